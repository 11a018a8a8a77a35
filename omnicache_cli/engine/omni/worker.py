"""vLLM-Omni's runners in vLLM's CPU worker: all they need is the base class for the CPU."""

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class CpuARModelRunner(GPUARModelRunner, CPUModelRunner):
    """Of stages that sample token by token: thinker, talker."""


class CpuGenerationModelRunner(GPUGenerationModelRunner, CPUModelRunner):
    """Of stages that compute their output in one go: code2wav."""


class CpuARWorker(OmniWorkerMixin, CPUWorker):
    """Builds vLLM-Omni's runner in place of vLLM's."""

    model_runner_cls = CpuARModelRunner  # vLLM-Omni asks it whether stages can be connected

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)


class CpuGenerationWorker(OmniWorkerMixin, CPUWorker):
    """Builds vLLM-Omni's runner in place of vLLM's."""

    model_runner_cls = CpuGenerationModelRunner

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)
