"""What cuBLASLt reaches on this GPU by its default choice, and by the best of its kernels that are made for Ampere (mma.sync).

Every algorithm that the library lists is tried with every tile and stage count that it takes. Which kernel an algorithm is, is asked of
a captured graph: cuFuncGetName. Times are the median of events around a launch, the level 2 cache overwritten before each, and the
default's are taken in turn with those of the others.
"""

import ctypes as C
import glob
import json
import os
import statistics
import sys
import time

BF16, F32, COMPUTE = 14, 0, 68
SECONDS = float(os.environ.get("LIMIT", "60"))
BEGAN = time.time()


def library(name, patterns):
    for folder in sys.path + ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu"]:
        for pattern in patterns:
            for path in sorted(glob.glob(os.path.join(folder, pattern))):
                try:
                    return C.CDLL(path, mode=C.RTLD_GLOBAL)
                except OSError as error:
                    print("cannot open", path, error)
    return C.CDLL(name)


cuda = C.CDLL("libcuda.so.1")
for name in ("nvidia/cu13/lib/libcublas.so*", "nvidia/cublas/lib/libcublas.so*"):
    for folder in sys.path:
        for path in glob.glob(os.path.join(folder, name)):
            os.environ.setdefault("LD_LIBRARY_PATH", os.path.dirname(path))
lt = library("libcublasLt.so.13", [
    "nvidia/cu13/lib/libcublasLt.so.1[23]", "nvidia/cublas/lib/libcublasLt.so.1[23]", "torch/lib/libcublasLt.so.1[23]",
    "libcublasLt.so.1[23]",
])


def check(what, code):
    if code != 0:
        raise RuntimeError(f"{what}: {code}")


def call(name, *arguments):
    check(name, getattr(cuda, name)(*arguments))


P, U64, SZ = C.c_void_p, C.c_uint64, C.c_size_t
call("cuInit", 0)
device, context, stream = C.c_int(), P(), P()
call("cuDeviceGet", C.byref(device), 0)
call("cuDevicePrimaryCtxRetain", C.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuStreamCreate", C.byref(stream), 1)


def memory(count):
    address = U64()
    call("cuMemAlloc_v2", C.byref(address), SZ(count))
    return address


FLUSH = memory(192 << 20)
WORKSPACE_BYTES = 32 << 20
WORKSPACE = memory(WORKSPACE_BYTES)
UNIT = 1 << 22
RANDOM = int.from_bytes(os.urandom(UNIT), "little") & int.from_bytes(b"\x7f\x80" * (UNIT // 2), "little")
RANDOM |= int.from_bytes(b"\x00\x3f" * (UNIT // 2), "little")
RANDOM = RANDOM.to_bytes(UNIT, "little")


def filled(count):
    address = memory(count)
    for at in range(0, count, UNIT):
        call("cuMemcpyHtoD_v2", U64(address.value + at), RANDOM, SZ(min(UNIT, count - at)))
    return address


lt.cublasLtMatrixLayoutCreate.argtypes = [P, C.c_int, U64, U64, C.c_int64]
handle = P()
check("create", lt.cublasLtCreate(C.byref(handle)))


class Algo(C.Structure):
    _fields_ = [("data", C.c_uint64 * 8)]


class Result(C.Structure):
    _fields_ = [("algo", Algo), ("workspace", SZ), ("state", C.c_int), ("waves", C.c_float), ("reserved", C.c_int * 4)]


class KernelParams(C.Structure):
    _fields_ = [("func", P), ("sizes", C.c_uint * 7), ("params", P), ("extra", P), ("kern", P), ("ctx", P)]


class Product:
    """D[m, n] = A B as rows; the library is given the transpose, as the engine does."""

    def __init__(self, m, n, k, layout):
        self.size = (m, n, k, layout)
        self.flops = 2.0 * m * n * k
        # "tn" adds to what is there in f32, as bench gemm does of a gradient of weights; "tn-store" stores bf16.
        self.adds = layout == "tn"
        self.kind, self.beta = (F32, 1.0) if self.adds else (BF16, 0.0)
        layout = layout[:2]
        first, second = {"nt": (1, 0), "nn": (0, 0), "tn": (0, 1)}[layout]
        self.desc = P()
        check("desc", lt.cublasLtMatmulDescCreate(C.byref(self.desc), COMPUTE, F32))
        for attribute, value in ((3, first), (4, second)):
            value = C.c_int32(value)
            check("set", lt.cublasLtMatmulDescSetAttribute(self.desc, attribute, C.byref(value), SZ(4)))
        a = (k, m) if layout == "tn" else (m, k)
        b = (n, k) if layout == "nt" else (k, n)
        self.layouts = []
        for rows, columns, kind in ((*b, BF16), (*a, BF16), (m, n, self.kind)):
            made = P()
            check("layout", lt.cublasLtMatrixLayoutCreate(C.byref(made), kind, columns, rows, columns))
            self.layouts.append(made)
        self.b, self.a, self.d = filled(2 * n * k), filled(2 * m * k), memory(4 * m * n)

    def launch(self, algo, on=None):
        one, zero = C.c_float(1), C.c_float(self.beta)
        b, a, d = self.layouts
        return lt.cublasLtMatmul(
            handle, self.desc, C.byref(one), P(self.b.value), b, P(self.a.value), a, C.byref(zero), P(self.d.value), d,
            P(self.d.value), d, C.byref(algo), P(WORKSPACE.value), SZ(WORKSPACE_BYTES), on or stream)

    def default(self):
        preference, result, found = P(), Result(), C.c_int()
        check("preference", lt.cublasLtMatmulPreferenceCreate(C.byref(preference)))
        size = SZ(WORKSPACE_BYTES)
        check("preference", lt.cublasLtMatmulPreferenceSetAttribute(preference, 1, C.byref(size), SZ(8)))
        b, a, d = self.layouts
        check("heuristic", lt.cublasLtMatmulAlgoGetHeuristic(
            handle, self.desc, b, a, d, d, preference, 1, C.byref(result), C.byref(found)))
        return result.algo

    def all(self):
        ids, count = (C.c_int * 256)(), C.c_int()
        check("ids", lt.cublasLtMatmulAlgoGetIds(handle, COMPUTE, F32, BF16, BF16, self.kind, self.kind, 256, ids, C.byref(count)))
        b, a, d = self.layouts
        for number in ids[: count.value]:
            algo = Algo()
            if lt.cublasLtMatmulAlgoInit(handle, COMPUTE, F32, BF16, BF16, self.kind, self.kind, number, C.byref(algo)) != 0:
                continue
            lists = []
            for capability in (6, 13):
                values, written = (C.c_uint32 * 512)(), SZ()
                code = lt.cublasLtMatmulAlgoCapGetAttribute(
                    C.byref(algo), capability, values, SZ(C.sizeof(values)), C.byref(written))
                lists.append(list(values[: written.value // 4]) if code == 0 and written.value else [0])
            for tile in lists[0]:
                for stages in lists[1]:
                    this, result = Algo(), Result()
                    C.memmove(C.byref(this), C.byref(algo), C.sizeof(algo))
                    for attribute, value in ((1, tile), (6, stages)):
                        value = C.c_uint32(value)
                        lt.cublasLtMatmulAlgoConfigSetAttribute(C.byref(this), attribute, C.byref(value), SZ(4))
                    code = lt.cublasLtMatmulAlgoCheck(handle, self.desc, b, a, d, d, C.byref(this), C.byref(result))
                    if code == 0 and result.state == 0 and result.workspace <= WORKSPACE_BYTES:
                        yield (number, tile, stages), this

    def kernel(self, algo):
        graph, count = P(), SZ()
        call("cuStreamBeginCapture_v2", stream, 2)
        code = self.launch(algo)
        call("cuStreamEndCapture", stream, C.byref(graph))
        if code != 0:
            return None
        call("cuGraphGetNodes", graph, None, C.byref(count))
        nodes = (P * count.value)()
        call("cuGraphGetNodes", graph, nodes, C.byref(count))
        names = []
        for node in nodes:
            params, text = KernelParams(), C.c_char_p()
            if cuda.cuGraphKernelNodeGetParams_v2(P(node), C.byref(params)) != 0:
                continue
            if params.func and cuda.cuFuncGetName(C.byref(text), P(params.func)) == 0 and text.value:
                names.append(text.value.decode())
            elif params.kern and cuda.cuKernelGetName(C.byref(text), P(params.kern)) == 0 and text.value:
                names.append(text.value.decode())
        call("cuGraphDestroy", graph)
        return "+".join(names) or "unknown"


def event():
    made = P()
    call("cuEventCreate", C.byref(made), 0)
    return made


EVENTS = (event(), event())


def seconds(product, algo, flush=True):
    if flush:
        call("cuMemsetD8Async", FLUSH, C.c_ubyte(0), SZ(192 << 20), stream)
    call("cuEventRecord", EVENTS[0], stream)
    code = product.launch(algo)
    call("cuEventRecord", EVENTS[1], stream)
    call("cuStreamSynchronize", stream)
    if code != 0:
        return None
    taken = C.c_float()
    call("cuEventElapsedTime_v2" if hasattr(cuda, "cuEventElapsedTime_v2") else "cuEventElapsedTime", C.byref(taken), *EVENTS)
    return taken.value / 1e3


def ampere(name):
    lower = name.lower()
    return not any(word in lower for word in ("sm90", "sm100", "nvjet", "gmma", "hopper", "wgmma", "unknown"))


def main():
    version = lt.cublasLtGetVersion
    version.restype = SZ
    print("cuBLASLt", version(), flush=True)
    for text in sys.argv[1:]:
        m, n, k, layout = text.split(":")
        product = Product(int(m), int(n), int(k), layout)
        default = product.default()
        default_name = product.kernel(default)
        found = []
        for label, algo in product.all():
            if time.time() - BEGAN > SECONDS:
                print("out of time")
                break
            name = product.kernel(algo)
            if name is None or not ampere(name):
                continue
            times = [seconds(product, algo) for _ in range(3)]
            if None not in times:
                found.append((min(times[1:]), label, name, algo))
        found.sort(key=lambda one: one[0])
        best = found[:3]
        runs = [default] + [one[3] for one in best]
        taken = [[] for _ in runs]
        for turn in range(14):
            order = range(len(runs)) if turn % 2 == 0 else reversed(range(len(runs)))
            for index in order:
                taken[index].append(seconds(product, runs[index]))
        medians = [statistics.median(one[2:]) for one in taken]
        row = {
            "m": int(m), "n": int(n), "k": int(k), "layout": layout, "tried": len(found),
            "default_tflops": product.flops / medians[0] / 1e12, "default_kernel": default_name[:60],
        }
        if best:
            at = min(range(len(best)), key=lambda index: medians[1 + index])
            row["ampere_tflops"] = product.flops / medians[1 + at] / 1e12
            row["ampere_kernel"] = best[at][2][:90]
            row["ampere_algo"] = best[at][1]
        print(json.dumps(row), flush=True)


main()
