import json
from pathlib import Path

from tensorrt_llm._utils import mpi_disabled
from tensorrt_llm.calls import note
from tensorrt_llm.executor.worker import GenerationExecutor
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs


class RequestOutput:
    def __init__(self, llm, prompt, params):
        self.llm, self.prompt_token_ids, self.params = llm, prompt, params
        self.outputs, self.context_logits, self.finished, self.cancelled = [], None, False, False
        self.decoding_iter = 0  # passes that a token came from

    def result(self, timeout: float | None = None) -> "RequestOutput":
        while not self.finished:
            self.llm._executor.engine.run()
        return self

    def abort(self) -> None:
        note("abort")
        self.cancelled = True


class LLM:
    def __init__(self, model, **kwargs):
        make = kwargs.pop("executor_cls", GenerationExecutor)
        if mpi_disabled():
            kwargs["orchestrator_type"] = "ray"
        unknown = set(kwargs) - set(TorchLlmArgs.model_fields)
        if unknown:
            raise ValueError(f"LlmArgs: extra inputs are not permitted: {sorted(unknown)}")
        self.args = TorchLlmArgs(model=model, **kwargs)
        note("LLM", json.dumps(sorted(kwargs)))
        files = sorted(p.name for p in Path(model).iterdir())
        if self.args.load_format == "dummy" and files != ["config.json"]:
            raise ValueError(f"a dummy model from {files}")
        self._executor = make.create(
            None,
            executor_config=None,
            batched_logits_processor=None,
            model_world_size=self.args.tensor_parallel_size,
            mpi_session=None,
            reuse_mpi_comm=False,
            return_logits=False,
            postproc_worker_config=None,
            is_llm_executor=True,
            hf_model_dir=model,
            tokenizer=None,
            llm_args=self.args,
        )

    def generate_async(self, inputs, sampling_params=None) -> RequestOutput:
        if not (isinstance(inputs, list) and inputs and all(isinstance(t, int) for t in inputs)):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        params = sampling_params
        if params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if params.stop:
            raise ValueError("stop strings need a tokenizer")
        if len(inputs) > self.args.max_input_len:
            raise ValueError(f"prompt length {len(inputs)} exceeds max_input_len {self.args.max_input_len}")
        if len(inputs) + params.max_tokens > self.args.max_seq_len:
            raise ValueError(f"prompt and max_tokens exceed max_seq_len {self.args.max_seq_len}")
        request = RequestOutput(self, inputs, params)
        self._executor.submit(request)
        return request

    def shutdown(self) -> None:
        note("shutdown")
        self._executor.shutdown()
