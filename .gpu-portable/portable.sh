#!/bin/bash
# Portable matrix products on a Hopper GPU: their checks, their rates in every shape beside cuBLASLt's default and the best of its kernels
# for Ampere. Wants the release build at /tmp/w/counterpoint (or BIN=...). Prints a table last; everything lies in $OUT.
set -u
here=$(cd "$(dirname "$0")" && pwd)
BIN=${BIN:-/tmp/w/counterpoint}
OUT=${OUT:-/tmp/w/out-portable}
mkdir -p "$OUT"
export COUNTERPOINT_CACHE_DIR=${COUNTERPOINT_CACHE_DIR:-/tmp/w/cubins-portable}
began=$SECONDS
stamp() { echo "== $((SECONDS - began)) s: $*"; }
SHAPES=${SHAPES:-4096:4096:4096,8192:8192:4096,2048:12288:4096}
TILES=${TILES:-16}
stamp compile; timeout 90 "$BIN" selftest --compile-only --only portable_gemm > "$OUT/compile.txt" 2>&1; echo "status $?"; tail -4 "$OUT/compile.txt"
stamp checks; timeout 120 "$BIN" selftest --device cuda --only "portable gemm" > "$OUT/gemm.txt" 2>&1; echo "status $?"; tail -12 "$OUT/gemm.txt"
for layout in nt nn tn; do
  stamp "bench $layout"
  timeout 60 "$BIN" bench gemm --device cuda --kernels portable --shapes "$SHAPES" --layouts $layout --tiles "$TILES" --json > "$OUT/bench-$layout.jsonl" 2> "$OUT/bench-$layout.err"
  echo "status $?"; tail -2 "$OUT/bench-$layout.err"
done
# The loop without the end of a tile: of four times as many terms the end is a quarter.
stamp "bench long and short"
timeout 60 "$BIN" bench gemm --device cuda --kernels portable --shapes "${LONG:-4096:4096:16384,4096:4096:1024}" --layouts nt,tn --tiles "$TILES" --json > "$OUT/long.jsonl" 2> "$OUT/long.err"
echo "status $?"; tail -2 "$OUT/long.err"
stamp library
products=()
for shape in ${SHAPES//,/ }; do for layout in tn nt nn tn-store; do products+=("$shape:$layout"); done; done
LIMIT=${LIMIT:-60} timeout 120 python3 "$here/library_rates.py" "${products[@]}" > "$OUT/library.jsonl" 2> "$OUT/library.err"
echo "status $?"; tail -3 "$OUT/library.err"
stamp layers; timeout 120 "$BIN" selftest --device cuda --quick --only "portable linear" > "$OUT/linear.txt" 2>&1; echo "status $?"; tail -8 "$OUT/linear.txt"
stamp signals; timeout 90 "$BIN" selftest --device cuda --quick --only "signals of products" > "$OUT/signals.txt" 2>&1; echo "status $?"; tail -8 "$OUT/signals.txt"
stamp table
python3 - "$OUT" <<'END'
import glob, json, sys
out = sys.argv[1]
def lines(path):
    for line in open(path):
        line = line.strip()
        if line.startswith("{"):
            yield json.loads(line)
library = {}
try:
    for row in lines(out + "/library.jsonl"):
        library[(row["m"], row["n"], row["k"], row["layout"])] = row
except OSError as error:
    print(error)
ours = {}
for path in sorted(glob.glob(out + "/bench-*.jsonl")) + [out + "/long.jsonl"]:
    for row in lines(path):
        row = row.get("row", row)
        if "tflops" in row:
            ours.setdefault((row["m"], row["n"], row["k"], row["layout"]), []).append(row)
print("product | chosen tile TFLOP/s | best tile TFLOP/s | cuBLASLt default (bench) | its best Ampere kernel | chosen / Ampere | best / Ampere | best / default | best / Ampere that stores bf16 (tn)")
for size, rows in sorted(ours.items(), key=str):
    first, best = rows[0], max(rows, key=lambda row: row["tflops"])
    other = library.get(size, {})
    ampere = other.get("ampere_tflops", float("nan"))
    stored = library.get((*size[:3], "tn-store"), {}).get("ampere_tflops", float("nan"))
    print(*size, "|", first["tile"], f'{first["tflops"]:.0f}', "|", best["tile"], f'{best["tflops"]:.0f}', "|",
          f'{first["library_tflops"]:.0f}', "|", f"{ampere:.0f}", "|", f'{first["tflops"] / ampere:.3f}', "|", f'{best["tflops"] / ampere:.3f}', "|",
          f'{best["tflops"] / first["library_tflops"]:.3f}', "|",
          f'{best["tflops"] / stored:.3f}' if size[3] == "tn" else "")
print("TFLOP/s of every tile, columns as the products above")
tiles = sorted({row["tile"] for rows in ours.values() for row in rows})
for tile in tiles:
    of = [next((f'{row["tflops"]:5.0f}' for row in rows if row["tile"] == tile), "    -") for _, rows in sorted(ours.items(), key=str)]
    print(f"{tile:14}", *of)
for size, row in library.items():
    print(*size, row.get("default_kernel"), f'{row["default_tflops"]:.0f};', row.get("ampere_kernel"), row.get("ampere_algo"), "of", row["tried"])
END
stamp end
