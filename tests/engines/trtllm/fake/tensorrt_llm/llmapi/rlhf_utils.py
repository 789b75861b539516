"""What its own workers do at the end of an update, of the newest versions."""

import os


class WorkerExtension:
    if os.environ.get("FAKE_TRTLLM_VERSION", "1.4.0rc1").startswith("1.4"):

        def finalize_weight_update(self) -> None:
            engine = self.engine.model_engine
            engine.model_loader.finalize_update_weights()
            for module in engine.model.modules():
                if not getattr(module, "_weights_removed", False):
                    module.process_weights_after_loading()
                    module.post_load_weights()
