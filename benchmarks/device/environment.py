"""What the machine is, as JSON: GPU, driver, versions, and whether our operators run on it."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys


def output_of(*command: str) -> str:
    """What a program prints, or why it prints nothing."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    result = subprocess.run(command, capture_output=True, text=True)
    return (result.stdout or result.stderr).strip()


def main() -> None:
    import torch

    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory"
    facts: dict[str, object] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "gpu": output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "nvcc": output_of("nvcc", "--version").splitlines()[-1],
        "compute_sanitizer": output_of("compute-sanitizer", "--version").splitlines()[-1],
    }
    print(json.dumps(facts, indent=1))
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")


if __name__ == "__main__":
    main()
