//! `counterpoint bench gemm-collective`, as far as it goes without a GPU.

use crate::support::Folder;

/// Every policy gives the same bits, on sizes that divide and that do not, for every collective.
#[test]
fn cpu_ranks_run_every_collective() {
    let folder = Folder::new();
    let line = "bench gemm-collective --ranks 3 --shapes 96:48:32,100:40:24 --cycles 1 \
                --overlap sequential,concurrent,fused --json";
    let rows = folder.run(line).ok().json_lines();
    assert_eq!(rows.len(), 3 * 2 * 3, "collectives, shapes, policies");
    for (row, policy) in rows.iter().zip(["sequential", "concurrent", "concurrent+fused"].iter().cycle()) {
        assert_eq!(row["overlap"], *policy, "{row}");
        assert_eq!(row["different"], 0, "{row}");
        let figure = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
        assert!(figure("seconds") > 0.0 && figure("of_bound") <= 1.0, "{row}");
        assert!(figure("error") > 0.0, "a result in f32 is never exact: {row}");
        assert!(row["library"].is_null(), "{row}");
    }
    let line = "bench gemm-collective --ranks 2 --shapes 64:32:32 --collective all-reduce --cycles 1 \
                --overlap auto --json";
    let row = &folder.run(line).ok().json_lines()[0];
    assert!(row["asked"] == "auto" && row["overlap"] != "auto", "{row}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = Folder::new();
    folder.refuses("bench gemm-collective --ranks 1", &["--ranks"]);
    folder.refuses("bench gemm-collective --collective broadcast", &["broadcast", "reduce-scatter"]);
    folder.refuses("bench gemm-collective --shapes 8:8", &["give m, n and k"]);
    folder.refuses("bench gemm-collective --overlap fused+copy-engine", &["fused", "copy-engine"]);
    // Without a GPU: what is missing, and status 3.
    if !std::path::Path::new("/dev/nvidia0").exists() {
        folder.run("bench gemm-collective --device cuda --quick").is_refusal(3, &["NVIDIA"]);
    }
}
