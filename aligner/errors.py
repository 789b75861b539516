"""The project's errors. Every message names the value, what was expected, and the config key to change."""

from __future__ import annotations

from typing import Any

NO_RESTART = 93  # exit code of a batch job's ranks when starting them again would fail in the same way


class AlignerError(Exception):
    """Base of every error that a user can cause or act upon. `exit_code` is the process's; in a batch job it is
    NO_RESTART unless `transient`: starting again may help."""

    exit_code = 1
    transient = False

    def __reduce__(self):
        """Pickle the state too: ranks send their errors to each other, and unpickling would call a class with the
        message alone."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[AlignerError], args: tuple[Any, ...], state: dict[str, Any]) -> AlignerError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(AlignerError):
    """A config value is wrong. Raised before any training; nothing has been written but the message."""

    exit_code = 2

    def __init__(self, key: str, value: Any, expected: str, hint: str = ""):
        self.key, self.value, self.expected = key, value, expected
        text = f"{key}={value!r}: expected {expected}"
        super().__init__(f"{text}. {hint}" if hint else text)


class UnknownKeyError(ConfigError):
    """A config key that does not exist; the message carries the nearest valid name."""

    def __init__(self, key: str, nearest: str | None):
        self.hint = f"Did you mean `{nearest}`?" if nearest else "See `python -m aligner run --cfg` for all keys."
        super().__init__(key, None, "an existing config key", self.hint)
        self.args = (f"unknown config key `{key}`. {self.hint}",)


class DataError(AlignerError):
    """A dataset, tokenizer or chat template cannot be used; names file and line where there is one."""

    exit_code = 2


class RewardError(AlignerError):
    """A reward function could not be imported, raised, timed out, or returned something that is no score."""

    transient = True  # a remote judge may be out of order for an hour


class RewardPathError(RewardError):
    """A reward function cannot be imported, or does not take what the config gives it: bad input."""

    exit_code = 2
    transient = False


class AlgorithmCodeError(AlignerError):
    """A user's function of `algorithm` cannot be imported, or must not be trained with as it is: bad input."""

    exit_code = 2


class TrackerCodeError(AlignerError):
    """A user's tracker cannot be imported, or lacks a method: bad input."""

    exit_code = 2


class FamilyCodeError(AlignerError):
    """A user's model family cannot be imported, or has what nothing here computes: bad input."""

    exit_code = 2


class EngineCodeError(AlignerError):
    """A user's engine cannot be imported, or lacks a method: bad input."""

    exit_code = 2


class SiteCodeError(AlignerError):
    """A user's description of a cluster cannot be imported: bad input."""

    exit_code = 2


class StageCodeError(AlignerError):
    """A user's file with a stage cannot be imported, or has no STAGE or main(job): bad input."""

    exit_code = 2


class EnvironmentCodeError(AlignerError):
    """A tool or environment cannot be imported, or describes itself too little for a model to call it: bad input."""

    exit_code = 2


class EnvironmentFailedError(AlignerError):
    """All samples of a rollout are invalid, because their tools or environments failed again and again."""

    transient = True


class SandboxError(AlignerError):
    """A sandbox broke, or the machine stalled: that shows nothing about the program in it."""

    transient = True


class PeerError(AlignerError):
    """A message that claims to come from a rank of this job does not: a stranger reaches the job's ports."""

    transient = True


class RefitError(AlignerError):
    """An engine does not hold the trainer's weights: a tensor missing or doubled, a version or checksum or
    sentinel that disagrees."""

    transient = True


class EngineError(AlignerError):
    """A rollout engine's process ended, did not answer in time, or answered with an error of its own."""

    transient = True


class SuiteError(AlignerError):
    """A suite that evaluates the run (`eval.tasks`) failed; names its log."""


class MismatchError(AlignerError):
    """The engine's logprobs of a rollout differ from the trainer's by more than the gate `mismatch.stop_above`."""


class OutOfMemoryError(AlignerError):
    """A phase did not fit into memory on one rank; names the phase, its budgets, what was held, and the keys."""


class MemoryLimitError(AlignerError):
    """A phase used more than `memory.limit` allows; raised on every rank, after a whole step."""


class CheckpointError(AlignerError):
    """A checkpoint is damaged, or belongs to another model, tokenizer or algorithm."""

    exit_code = 2


class ViewError(AlignerError):
    """Ranks find different files at one path."""

    transient = True  # a file system may not be mounted on one node


class WriteError(AlignerError):
    """The run folder cannot be written: a full disk, a file system that is not mounted."""

    transient = True


class LayoutError(ConfigError):
    """World size or heads do not divide by the parallel layout, or its stages do not fit the layers."""


class RunFailedError(AlignerError):
    """A run that `aligner.train` started has failed; names the run's own error, and its `exit_code`."""

    def __init__(self, text: str, exit_code: int):
        super().__init__(text)
        self.exit_code = exit_code


class MissingExtraError(AlignerError):
    """A package is not installed; `extra` installs it, "" if it belongs to no extra."""

    exit_code = 2

    def __init__(self, package: str, extra: str, why: str):
        wanted = f"'aligner[{extra}]'" if extra else package
        super().__init__(f"{why} needs `{package}`: pip install {wanted}")
