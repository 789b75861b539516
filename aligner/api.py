"""The public API: what a stage is made of. Stages in `aligner/stages` use the same.

`from aligner import api` imports nothing else; `api.NAME` imports what NAME needs. So the configuration can read a
user's stage without torch.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `homes` reads these lines; their comments are the sections of docs/reference/api.md
    # isort: off
    # The stage and its keys
    from aligner.config.stage import Stage as Stage
    from aligner.config.key import Section as Section
    from aligner.config.key import key as key
    from aligner.config.rule import rules as rules
    from aligner.config.schema import Config as Config
    from aligner.config.derived import response_limit as response_limit

    # A run
    from aligner.builders.job import Job as Job
    from aligner.builders.runs import make_run as make_run
    from aligner.builders.runs import saved_first as saved_first
    from aligner.builders.runs import finish as finish
    from aligner.run.loop import Run as Run
    from aligner.ops.seeds import derive as derive

    # Models by role
    from aligner.builders.models import make_policy as make_policy
    from aligner.builders.models import make_reference as make_reference
    from aligner.builders.models import make_critic as make_critic
    from aligner.builders.models import make_reward_model as make_reward_model
    from aligner.builders.models import optimizer_steps as optimizer_steps
    from aligner.roles.policy import Policy as Policy
    from aligner.roles.policy import Reference as Reference
    from aligner.roles.policy import TokenOutputs as TokenOutputs
    from aligner.roles.critic import Critic as Critic

    # Rows of files
    from aligner.builders.data import make_answers as make_answers
    from aligner.builders.data import make_training_set as make_training_set
    from aligner.builders.data import make_batches as make_batches
    from aligner.builders.answers import make_answer_evaluation as make_answer_evaluation
    from aligner.data.collate import collate_sft as collate_sft

    # Rollouts
    from aligner.builders.rollouts import find_prompts as find_prompts
    from aligner.builders.rollouts import make_rollouts as make_rollouts
    from aligner.rollout.source import Rollouts as Rollouts
    from aligner.run.mismatch import correct_mismatch as correct_mismatch
    from aligner.run.mismatch import check_mismatch as check_mismatch
    from aligner.rollout.loss_inputs import set_token_rewards as set_token_rewards
    from aligner.rollout.statistics import rollout_metrics as rollout_metrics
    from aligner.rollout.balance import Balancer as Balancer
    from aligner.rollout.loss_inputs import minibatches as minibatches
    from aligner.rollout.loss_inputs import average as average
    from aligner.rollout.finish import finish_rollout as finish_rollout

    # Advantages and losses
    from aligner.algorithms.advantages import group_advantages as group_advantages
    from aligner.algorithms.advantages import critic_advantages as critic_advantages
    from aligner.algorithms.losses import policy_loss as policy_loss
    from aligner.ops.rl.aggregate import aggregate as aggregate
    from aligner.ops.rl.aggregate import denominator as denominator

    # Data on its way
    from aligner.types import LossOutput as LossOutput
    from aligner.types import PolicyTargets as PolicyTargets
    from aligner.types import RolloutBatch as RolloutBatch
    from aligner.types import TrainBatch as TrainBatch
    from aligner.types import ValueTargets as ValueTargets

    # Model families
    from aligner.families.family import Family as Family
    from aligner.families.family import MoeKeys as MoeKeys
    from aligner.families import rows as rows

    # Sites
    from aligner.cluster.site import Site as Site
    from aligner.cluster.site import Container as Container
    from aligner.cluster.site import Binding as Binding

    # Engines
    from aligner.config.engines import EngineEntry as EngineEntry
    from aligner.config.engines import Capabilities as Capabilities
    from aligner.engines.base import RolloutEngine as RolloutEngine
    from aligner.engines.base import UpdateLedger as UpdateLedger
    from aligner.families.hf_config import hf_config as hf_config
    from aligner.models.params import expected_hf_shapes as expected_hf_shapes
    from aligner.ops.kernels.checksum import tensor_checksum as tensor_checksum
    from aligner.errors import ConfigError as ConfigError
    from aligner.types import Generations as Generations
    from aligner.types import SamplingParams as SamplingParams


@cache
def homes() -> dict[str, str]:
    """Return name -> the module that has it, in the order of this file."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {line.names[0].name: str(line.module) for line in block.body if isinstance(line, ast.ImportFrom)}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return list(homes())
    if name not in homes():
        raise AttributeError(f"aligner.api has no `{name}`: {', '.join(homes())}")
    return getattr(import_module(homes()[name]), name)


def __dir__() -> list[str]:
    return list(homes())
