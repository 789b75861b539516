"""The small files that go with weights."""

import json

from aligner.models.small_files import GENERATION, carried_config, write_generation


def test_an_export_names_the_stop_tokens_of_the_run(tmp_path):
    (tmp_path / GENERATION).write_text(json.dumps({"eos_token_id": 7, "temperature": 0.6}))
    write_generation(tmp_path, {}, (7, 9))
    assert json.loads((tmp_path / GENERATION).read_text()) == {"eos_token_id": [7, 9], "temperature": 0.6}
    text = (tmp_path / GENERATION).read_text()
    write_generation(tmp_path, {}, (9, 7))  # the same: the file stays as it is
    assert (tmp_path / GENERATION).read_text() == text
    (tmp_path / GENERATION).unlink()
    write_generation(tmp_path, {"pad_token_id": 3, "bos_token_id": None}, (5,))
    assert json.loads((tmp_path / GENERATION).read_text()) == {"pad_token_id": 3, "eos_token_id": 5}


def test_what_training_did_not_change_keeps_its_value(tmp_path):
    before = {"model_type": "mixtral", "router_aux_loss_coef": 0.02, "attention_dropout": 0.1, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(before))
    own = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 8, "attention_dropout": 0.0}
    assert carried_config(tmp_path, own | {"router_aux_loss_coef": 0.0})["router_aux_loss_coef"] == 0.02
    actual = carried_config(tmp_path, own | {"router_aux_loss_coef": 0.001})
    assert (actual["router_aux_loss_coef"], actual["attention_dropout"], actual["vocab_size"]) == (0.001, 0.1, 8)


def test_what_means_the_same_to_the_language_model_stays_as_it_was(tmp_path):
    """Parts beside it may read it: a null, another value, or nothing."""
    own = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "a": 1, "b": 1, "c": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "a": None, "b": 2}))
    actual = carried_config(tmp_path, own, ("a", "b", "c"))
    assert (actual["a"], actual["b"], "c" in actual) == (None, 2, False)


def test_an_export_has_the_name_that_classes_know(tmp_path):
    before = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(before | {"aux_loss_alpha": 0.001, "eos_token_id": 5}))
    own = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "eos_token_id": 1}
    assert carried_config(tmp_path, own) == own | {"aux_loss_alpha": 0.001, "eos_token_id": 5}
