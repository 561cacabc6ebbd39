"""`python -m tests.simulated_gpu`: tests on all simulated devices, and which branches off the CPU they ran.

On the M2 run the tests of everything that depends on the device, on the others those of what differs between GPUs.
The exit code is 1 if a test fails, or if a branch was neither run nor listed in `metal_kernels/README.md`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.simulated_gpu.branches import requirements, unmet
from tests.simulated_gpu.devices import DEVICES

GPU_TESTS = """
    simulated_gpu kernels test_launches.py
    train/test_memory_limits.py generation/test_kv_memory.py generation/test_loaded_model.py plan/test_kernel_cases.py
"""
# The slowest files first, so that no worker waits for one of them at the end.
ALL_TESTS = f"""
    cli/test_quickstart.py cli/test_kernels.py doctor {GPU_TESTS} model cache plan backend
    checkpoint/test_load.py checkpoint/test_dequantize.py checkpoint/test_huggingface.py checkpoint/test_mlx_lm.py
    checkpoint/gguf/test_affine.py checkpoint/test_quantized_formats.py
    checkpoint/test_tensor_parallel.py::test_groups_that_cannot_be_shared_are_dequantized
    generation/test_engine.py generation/test_decoding.py generation/test_decode_step.py generation/test_prefill.py
    generation/test_deterministic.py generation/test_speculative_text.py generation/test_logit_filters.py
    generation/test_launches.py
    chat/test_session.py chat/test_context_overflow.py chat/test_generate.py
    server/test_chat_completions.py server/test_models.py server/test_run.py
    train/test_step.py train/test_run.py train/test_loop.py train/test_finetune.py train/test_start.py
    quantize/test_pipeline.py quantize/test_mixtures.py::test_an_evaluation_needs_memory
    quantize/test_mixtures.py::test_layers_one_after_another_are_the_model[granitemoe:float32]
    cli/test_doctor.py cli/test_inspect.py
"""


def main() -> int:
    """Run the tests of each device and print their results and what was not run; returns the exit code."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        coverage, settings = Path(folder, "coverage"), Path(folder, "settings")
        # Only the files with such branches: to trace the others takes as long as the tests.
        files = dict.fromkeys(f"*/{requirement.file}" for requirement in requirements())
        settings.write_text("\n    ".join(["[run]\nbranch = true\ninclude =", *files]) + "\n")
        for device in sorted(DEVICES, key=lambda name: name != "simulated-m2"):
            print(f"== {device}", flush=True)
            tests = dict.fromkeys((ALL_TESTS if device == "simulated-m2" else GPU_TESTS).split())
            options = ["-n", "auto", "--device", device, "--cov", f"--cov-config={settings}", "--cov-append"]
            command = [sys.executable, "-m", "pytest", *options, "--cov-report=", *(f"tests/{test}" for test in tests)]
            if subprocess.run(command, env={**os.environ, "COVERAGE_FILE": str(coverage)}).returncode:
                failed.append(device)
        missing, count = unmet(coverage)
    for requirement in missing:
        print(requirement)
    print(f"{count - len(missing)} of {count} statements and branches that only run off the CPU were run or are listed")
    return bool(failed or missing)


if __name__ == "__main__":
    sys.exit(main())
