from tensorrt_llm.calls import note


class MoeLoadBalancer:
    def __init__(self, executor):
        self.executor, self.slots = executor, False

    def register_weight_slots_after_to_cuda(self) -> None:
        note("slots")
        self.executor.require_control("slots")
        self.slots = True

    def finalize_model(self) -> None:
        note("placed")
        if not self.slots:
            raise RuntimeError("experts are placed before their slots are known")
        self.slots = False
