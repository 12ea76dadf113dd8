"""What every worker process does first: its output goes to a file of its own, and its environment is set before heavy imports.

Ray calls `enter` in every worker process of the job (`worker_process_setup_hook`), before the actor's class is unpickled.
"""

import faulthandler
import os
from pathlib import Path

LOG_FILE = "RLOOPER_LOG_FILE"
# glibc returns large blocks to the kernel at once by default; engines and learner then pay a page fault per 4 KiB again and again
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",  # an arena of another thread than the first holds 64 MiB at most and maps anew what is larger
    "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for huge pages
}
PASSED_ON = ("HF_HUB_OFFLINE", "HF_HOME", "HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def runtime_env(*, name: str, log_dir: Path, threads: int) -> dict[str, object]:
    """Build the Ray runtime environment of one worker.

    Args:
        name: of the actor; also of its log file.
        log_dir: folder of the log files, made on the worker's node where it is missing.
        threads: OpenMP threads of the process.
    """
    env = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
    env |= MALLOC | {
        LOG_FILE: str(log_dir / f"{name}.log"),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_COMPILE_DISABLE": os.environ.get("TORCH_COMPILE_DISABLE", "1" if _no_gpu() else "0"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu" if _no_gpu() else "cuda"),
    }
    return {"env_vars": env}


def enter() -> None:
    """Send standard output and error to the worker's log file, native libraries' included."""
    if LOG_FILE not in os.environ:
        return  # a worker process that Ray started in advance, for nobody yet
    path = Path(os.environ[LOG_FILE])
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()


def log_tail(name: str, log_dir: Path, lines: int = 12) -> str:
    """Read the last lines of a worker's log, where it lies on this node."""
    path = log_dir / f"{name}.log"
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _no_gpu() -> bool:
    return not Path("/proc/driver/nvidia/version").exists()
