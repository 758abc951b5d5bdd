"""Compile the step of GPT-2 XL for eight devices that are not there; print memory, collectives and their overlap.

`--overlap all` instead compiles a GPT-2 of width 4096 with each way to hide the communication of tensor parallelism, on two meshes.
The devices are H100s of one host, or with `--hardware v5e` a 2x4 slice of TPU v5e.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

# Run as a script, its folder is on the path and the project is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GIB = 2**30
COMPILER_MISSING = 3
H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132
fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES } registers_per_core_limit: 65536
registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
device_vendor: "NVIDIA Corporation" device_interconnect_info { active_links: 18 } } platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3\""""
# Options of the GPU compiler that let it hide collectives behind matmuls.
OVERLAP = {
    "xla_gpu_enable_analytical_latency_estimator": True,
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_disable_hlo_passes": "collective-permute-motion",
    "xla_gpu_enable_triton_gemm": False,
}
# How each device's program is compiled.
COMPILER_OPTIONS: dict[str, dict] = {"h100": OVERLAP, "v5e": {}}
# The topologies of TPUs, by their number of devices.
V5E = {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"}


def absent_mesh(hardware: str, data: int, pipe: int, tensor: int):
    """A mesh over devices that need not exist, "h100" or "v5e"; call it before JAX is imported.

    Raises SystemExit(COMPILER_MISSING) where the compiler for them is not installed.
    """
    # Read when JAX is imported; without it the compilers look for their devices.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    import jax
    from jax.experimental import topologies

    import merak_jax

    count = data * pipe * tensor
    if hardware == "v5e" and count not in V5E:
        raise SystemExit(f"a mesh of {count} devices is no v5e slice: {', '.join(map(str, V5E))}")
    try:
        if hardware == "v5e":
            topology = topologies.get_topology_desc(platform="tpu", topology_name=V5E[count])
        else:
            topology = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology=f"1x1x{count}")
    except Exception as error:
        packages = {
            "h100": f"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}",
            "v5e": "libtpu==0.0.42.1",
        }
        print(f"no compiler for {hardware}: {error}; pip install --no-deps {packages[hardware]}", file=sys.stderr)
        raise SystemExit(COMPILER_MISSING) from error
    return merak_jax.make_mesh(data=data, pipe=pipe, tensor=tensor, devices=topology.devices)


def gpt2_step(name: str, length: int, rows: int, mesh, num_microbatches: int, options=None, **changes):
    """`(step, state shapes, batch shapes)` of a published GPT-2 with bfloat16 arithmetic and float32 parameters.

    `rows`: of a microbatch on a device; `options`: of `parallelize`; `changes`: of the model's configuration.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax.training.train_state import TrainState

    import merak_jax
    from merak_jax.models.gpt2 import GPT2, GPT2Config, next_token_loss

    model = GPT2(GPT2Config.from_name(name, max_length=length, dtype=jnp.bfloat16, **changes))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))

    def create(key):
        params = model.init(key, jnp.zeros((1, length), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state, batch):
        def loss(params):
            return next_token_loss(state.apply_fn({"params": params}, batch["tokens"]), batch["targets"])

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    step = merak_jax.parallelize(train_step, mesh=mesh, num_microbatches=num_microbatches, **(options or {}))
    tokens = jax.ShapeDtypeStruct((mesh.shape["data"] * num_microbatches * rows, length), jnp.int32)
    return step, jax.eval_shape(create, jax.random.key(0)), {"tokens": tokens, "targets": tokens}


def report(options: argparse.Namespace) -> dict:
    """Compile and read the program: sizes in bytes per device, collectives by kind, those inside loops one by one."""
    mesh = absent_mesh(options.hardware, *options.mesh)
    import jax

    from benchmarks.hlo import Program

    changes = {"vocab_size": options.vocabulary, "num_heads": options.heads}
    changes = {name: value for name, value in changes.items() if value is not None}
    step, state, batch = gpt2_step(options.model, options.length, options.rows, mesh, options.microbatches, **changes)
    start = time.perf_counter()
    lowered = step.lower(state, batch)
    traced = time.perf_counter()
    compiled = lowered.lowered.compile(compiler_options=COMPILER_OPTIONS[options.hardware])
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    if options.text:
        with open(options.text, "w") as file:
            file.write(text)
    program = Program(text)
    (layout,) = step._latest.layouts.values()
    shapes = jax.eval_shape(layout.pack, list(layout.avals))
    stored = [
        math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize
        for shape, sharding in zip(shapes, layout.shardings)
    ]
    return {
        "model": options.model,
        "hardware": options.hardware,
        "mesh": "·".join(map(str, options.mesh)),
        "microbatches": options.microbatches,
        "trace_s": round(traced - start, 1),
        "compile_s": round(done - traced, 1),
        "peak_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "state_bytes": sum(stored),
        "conditionals": program.count("conditional"),
        "instructions": program.num_instructions,
        "carry_bytes": options.rows * options.length * state.params["h_0"]["norm_1"]["scale"].shape[0] * 2,
        "smallest_kernel_bytes": min(
            math.prod(sharding.shard_shape(shape.shape)[2:]) * 2
            for shape, sharding in zip(shapes, layout.shardings)
            if shape.ndim >= 4
        ),
        "collectives": program.summary(),
        "in_loops": [
            {"kind": c.kind, "bytes": c.bytes, "largest": c.largest, "matmuls": c.matmuls}
            for c in program.collectives
            if c.loops
        ],
    }


# How each way is compiled: options of `parallelize`.
WAYS = {
    "none": {"overlap": "none", "sequence_parallel": False},
    "none, sequence split": {"overlap": "none", "sequence_parallel": True},
    "collective": {"overlap": "collective"},
    "collective, both directions": {"overlap": "collective", "ring_directions": (1, -1)},
    "paired": {"overlap": "paired"},
}
OVERLAP_MESHES = ((1, 2, 4), (1, 1, 8))


def sent_bytes(collective, size: int) -> int:
    """What a device sends over a `tensor` axis of `size` for a collective; a permute of a ring is sent `size - 1` times."""
    share = {
        "all-reduce": 2 * (size - 1) / size,
        "all-gather": (size - 1) / size,
        "reduce-scatter": size - 1,
        "collective-permute": size - 1,
    }[collective.kind]
    return round(collective.bytes * share)


def overlaps(options: argparse.Namespace) -> list[dict]:
    """A row per mesh and way: how many collectives of blocks have a matmul between start and done, and peak bytes."""
    from benchmarks.hlo import Program

    rows = []
    for sizes in [options.mesh] if options.mesh else OVERLAP_MESHES:
        mesh = absent_mesh(options.hardware, *sizes)
        for name, way in WAYS.items():
            if options.overlap not in ("all", way["overlap"]):
                continue
            changes = {"width": options.width, "num_heads": options.width // 128, "num_layers": 4, "vocab_size": 50304}
            step, state, batch = gpt2_step(
                options.model, options.length, options.rows, mesh, options.microbatches, way, **changes
            )
            start = time.perf_counter()
            compiled = step.lower(state, batch).lowered.compile(compiler_options=COMPILER_OPTIONS[options.hardware])
            memory, program = compiled.memory_analysis(), Program(compiled.as_text())
            own = [c for c in program.collectives if program.is_under(c, "block")]
            ((forward, backward),) = step.plan.tensor_bytes
            hidden = sum(bool(c.matmuls) for c in own)
            both = [c for c in own if program.is_under(c, "both")]
            rows.append(
                {
                    "hardware": options.hardware,
                    "mesh": "·".join(map(str, sizes)),
                    "way": name,
                    "collectives": len(own),
                    "hidden": hidden,
                    "share": round(hidden / len(own), 3),
                    "in_paired_loops": len(both),
                    "hidden_in_paired_loops": sum(bool(c.matmuls) for c in both),
                    "sent_bytes": sum(sent_bytes(c, sizes[2]) for c in own),
                    "planned_bytes": {"forward": forward, "backward": backward},
                    "kinds": sorted({c.kind for c in own}),
                    "peak_bytes": memory.argument_size_in_bytes
                    + memory.output_size_in_bytes
                    - memory.alias_size_in_bytes
                    + memory.temp_size_in_bytes,
                    "seconds": round(time.perf_counter() - start, 1),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--hardware", choices=sorted(COMPILER_OPTIONS), default="h100", help="compile for it (default h100)"
    )
    parser.add_argument("--model", default="gpt2-xl", help="a published GPT-2 (default gpt2-xl)")
    parser.add_argument(
        "--mesh",
        type=lambda text: tuple(int(n) for n in text.split(",")),
        help="data,pipe,tensor (default 2,2,2; with --overlap 1,2,4 and then 1,1,8)",
    )
    parser.add_argument("--microbatches", type=int, default=8, help="M (default 8)")
    parser.add_argument("--rows", type=int, default=1, help="rows of a microbatch on a device (default 1)")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row (default 1024)")
    parser.add_argument("--vocabulary", type=int, help="another vocabulary than the published 50257")
    parser.add_argument("--heads", type=int, help="another number of heads than the published")
    parser.add_argument(
        "--overlap", choices=("none", "collective", "paired", "all"), help="compare ways to hide communication"
    )
    parser.add_argument("--width", type=int, default=4096, help="of the model, with --overlap (default 4096)")
    parser.add_argument("--text", help="also write the scheduled program to this file")
    options = parser.parse_args()
    if options.overlap:
        rows = overlaps(options)
        if options.json:
            print(json.dumps(rows))
            return
        for row in rows:
            print(
                f"{row['hardware']} {row['mesh']} {row['way']:>28}: "
                f"{row['hidden']} of {row['collectives']} hidden ({', '.join(row['kinds'])}), "
                f"in paired loops {row['hidden_in_paired_loops']} of {row['in_paired_loops']}; "
                f"peak {row['peak_bytes'] / GIB:.2f} GiB"
            )
        return
    options.mesh = options.mesh or (2, 2, 2)
    result = report(options)
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{result['model']} on mesh {result['mesh']} of {result['hardware']}, {result['microbatches']} microbatches: traced in "
        f"{result['trace_s']} s, compiled in {result['compile_s']} s, {result['instructions']} instructions"
    )
    print(
        f"peak {result['peak_bytes'] / GIB:.1f} GiB a device: state {result['state_bytes'] / GIB:.1f}, "
        f"temporary {result['temp_bytes'] / GIB:.1f}, updated in place {result['alias_bytes'] / GIB:.1f}"
    )
    for kind, row in result["collectives"].items():
        print(
            f"{kind}: {row['count']}, {row['in_loops']} in loops, largest {row['largest_bytes']:,} bytes, "
            f"{row['asynchronous']} asynchronous, {row['overlapped']} with a matmul between start and done"
        )


if __name__ == "__main__":
    main()
