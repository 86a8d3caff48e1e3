"""The comparison as people read it."""

import statistics

from one_gpu.rows import key, of


def print_tables(rows, records, shapes, passes, clock):
    columns = ["counterpoint", "cudnn", "flash", "flex", "ffa"]
    seen = lambda peer: any(record["tflops"].get(peer) for record in records)
    columns = [peer for peer in columns if seen(peer)]
    unit = "TFLOP/s by unmasked area" if clock == "device" else "microseconds a call, launch included"
    for shape in shapes:
        for which in passes:
            print(f"\n{which}, {shape}, {shape.dtype}: {unit}; in brackets counterpoint's speed over it")
            print(f"{'':22}" + "".join(f"{peer:>18}" for peer in columns))
            for record in of(records, **{name: x for name, x in key(which, None, shape).items() if name != "mask"}):
                line = f"{record['mask']:22}"
                for peer in columns:
                    figure, ratio = record["tflops"].get(peer), record["ratios"].get(peer)
                    if clock != "device":
                        wanted = {name: value for name, value in record.items() if name not in ("tflops", "ratios")}
                        found = of(rows, by=peer, **wanted)
                        figure = found[0]["seconds"]["median"] * 1e6 if found else None
                    text = "-" if figure is None else f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}"
                    line += f"{text + (f' ({ratio:.2f}x)' if ratio else ''):>18}"
                print(line)
    if any(record["ratios"] for record in records):
        print(f"\n{'counterpoint over':22}{'pass':>10}{'geomean':>10}{'worst':>8}  worst case")
        for peer in columns[1:]:
            for which in passes:
                found = [r for r in of(records, **{"pass": which}) if peer in r["ratios"]]
                if not found:
                    continue
                mean = statistics.geometric_mean(r["ratios"][peer] for r in found)
                worst = min(found, key=lambda r: r["ratios"][peer])
                where = "{mask}, {seqlen} x {heads_q}:{heads_kv} x {head_dim}".format(**worst)
                print(f"{peer:22}{which:>10}{mean:>10.3f}{worst['ratios'][peer]:>8.3f}  {where}")
    if "ffa" in columns:
        print("ffa: tuned figures of published.json, scaled by cuDNN in this run over cuDNN in that one")
