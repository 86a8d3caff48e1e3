"""This project's own rows."""

import json
import subprocess


def ours(options, shape):
    """Rows of `counterpoint bench attention` for one shape."""
    command = [
        str(options.ours.resolve()), "bench", "attention", "--device", "cuda", "--json",
        "--masks", ",".join(options.masks), "--seqlens", str(shape.seqlen),
        "--heads", f"{shape.heads_q}:{shape.heads_kv}", "--head-dim", str(shape.head_dim),
        "--dtype", shape.dtype, "--passes", ",".join(options.passes),
        "--iterations", str(options.iterations), "--clock", options.clock, "--kernels", options.kernels,
    ]  # fmt: skip
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.limit)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"--ours: {error}") from error
    if ran.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with status {ran.returncode}")
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
