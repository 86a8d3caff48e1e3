//! Reports in a real browser without a window: everything is drawn, nothing fails, and the details can be reached by
//! pointer and by keyboard. Pages and screenshots stay in the target folder's `tmp/report`, to be looked at.

mod fixture;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_report::{Figures, HtmlReport, Origin, SimulationReport, TimelinePair};
use fixture::{Run, documents, lengths};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(90);

/// Runs Chromium on a page and gives its standard output.
fn chromium(page: &Path, arguments: &[&str]) -> String {
    let profile = tempfile::tempdir().unwrap();
    let (out, err) = (profile.path().join("stdout"), profile.path().join("stderr"));
    let mut child = Command::new("chromium")
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--hide-scrollbars",
        ])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--disable-dev-shm-usage", "--force-color-profile=srgb"])
        .arg(format!("--user-data-dir={}", profile.path().join("profile").display()))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .stdout(fs::File::create(&out).unwrap())
        .stderr(fs::File::create(&err).unwrap())
        .spawn()
        .unwrap_or_else(|error| {
            panic!(
                "these tests look at reports in Chromium, which cannot be started ({error}); install it: \
                 apt-get install --no-install-recommends chromium"
            )
        });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("Chromium did not end within {LIMIT:?}:\n{}", fs::read_to_string(&err).unwrap());
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success(), "Chromium failed: {status}\n{}", fs::read_to_string(&err).unwrap());
    fs::read_to_string(&out).unwrap()
}

fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report");
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Writes the page for people to look at, and photographs it.
fn photograph(name: &str, html: &str, width: usize, height: usize, dark: bool) -> Vec<u8> {
    let page = folder().join(format!("{name}.html"));
    fs::write(&page, html).unwrap();
    let theme = if dark { "dark" } else { "light" };
    let picture = folder().join(format!("{name}-{width}-{theme}.png"));
    let mut arguments =
        vec![format!("--screenshot={}", picture.display()), format!("--window-size={width},{height}")];
    if dark {
        arguments.push("--blink-settings=preferredColorScheme=0".to_owned());
    }
    chromium(&page, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
    fs::read(picture).unwrap()
}

/// What the self-check saw on the page, `width` wide.
fn seen(name: &str, html: &str, width: usize) -> Value {
    let check = format!("<script>{}</script></body>", include_str!("self_check.js"));
    assert_eq!(html.matches("</body>").count(), 1, "data must not contain markup");
    let page = folder().join(format!("{name}-{width}-checked.html"));
    fs::write(&page, html.replace("</body>", &check)).unwrap();
    let dom = chromium(&page, &["--dump-dom", &format!("--window-size={width},900")]);
    let text = dom.split("<pre id=\"seen\" hidden=\"\">").nth(1).and_then(|rest| rest.split("</pre>").next());
    let text = text.unwrap_or_else(|| {
        let error = dom.split("data-error=\"").nth(1).and_then(|rest| rest.split('"').next());
        panic!("{name}: the self-check did not finish; error on the page: {error:?}")
    });
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let seen: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(seen["error"], Value::Null, "{name}");
    assert_eq!(seen["drawn"], "yes", "{name}");
    assert!(
        seen["wideness"].as_i64().unwrap() <= 0,
        "{name}: the page is wider than {width}: {}",
        seen["wideness"]
    );
    seen
}

/// Nothing of the page comes from elsewhere.
fn assert_self_contained(html: &str) {
    for foreign in ["http:", "https:", "//cdn", "@import", "url(h", "src=", "<link", "<iframe", "<img"] {
        for (at, _) in html.match_indices(foreign) {
            let place = &html[at..(at + 60).min(html.len())];
            // The name of the SVG vocabulary is no address that anybody opens.
            assert!(
                place.starts_with("http://www.w3.org/2000/svg\""),
                "refers to something outside: {place}"
            );
        }
    }
}

fn text<'a>(seen: &'a Value, key: &str) -> &'a str {
    seen[key].as_str().unwrap_or_else(|| panic!("{key} is {}", seen[key]))
}

fn four_documents() -> Run {
    Run::new(documents([1500, 1096, 900, 600]), 4, 128)
}

#[test]
fn a_small_report_shows_everything() {
    let run = four_documents();
    let html = run.report().render();
    assert_self_contained(&html);
    let seen = seen("small", &html, 1280);
    let streams = run.measured[0].streams.len();
    assert_eq!(seen["areaBars"], 4);
    assert_eq!(seen["recvBars"], 4);
    assert_eq!(seen["means"], 2);
    assert_eq!(seen["rankRows"], 4);
    assert_eq!(seen["lanes"], 4 * 2 * streams);
    assert_eq!(seen["spans"], run.measured[0].spans.len() + run.predicted[0].spans.len());
    assert_eq!(seen["backwardSpans"], run.measured[1].spans.len() + run.predicted[1].spans.len());
    assert_eq!(seen["predictedWhenMeasured"], 0);
    let pairs: std::collections::BTreeSet<(usize, u32)> = run
        .plan
        .ranks
        .iter()
        .flat_map(|rank| {
            rank.forward.iter().flat_map(|s| &s.part.remote).map(|split| (rank.rank, split.rank))
        })
        .collect();
    assert_eq!(seen["cells"], pairs.len());

    assert!(text(&seen, "barTip").starts_with("rank 0\n"), "{}", seen["barTip"]);
    assert!(text(&seen, "barTip").contains("of the mean"));
    assert!(text(&seen, "cellTip").contains(" → rank ") && text(&seen, "cellTip").contains("rows"));
    assert!(text(&seen, "cellTipBytes").contains("B ("), "{}", seen["cellTipBytes"]);
    assert_eq!(seen["bytesPressed"], "true");
    for part in ["rank 0", "measured", " to ", "\nfor "] {
        assert!(text(&seen, "spanTip").contains(part), "{part} in {}", seen["spanTip"]);
    }
    // The pointer is at the centre of the mask: query and key 2048 are in the second document.
    for part in ["query 2,048: chunk 16", "key 2,048: chunk 16, its own"] {
        assert!(text(&seen, "maskTip").contains(part), "{part} in {}", seen["maskTip"]);
    }
    assert_eq!(seen["tipAfterLeave"], Value::Null);

    let bar_keys = &seen["barKeys"]["texts"];
    assert!(bar_keys[0].as_str().unwrap().starts_with("rank 0\n"));
    assert!(bar_keys[1].as_str().unwrap().starts_with("rank 1\n"));
    assert!(bar_keys[2].as_str().unwrap().starts_with("rank 0\n"));
    assert_eq!(seen["barKeys"]["after"], Value::Null, "leaving a chart takes its details away");
    assert!(seen["spanKeys"]["texts"][2].as_str().unwrap().contains("predicted"), "{}", seen["spanKeys"]);
    assert_eq!(seen["spanKeys"]["texts"][3], Value::Null, "Escape takes the details away");
    assert!(seen["cellKeys"]["texts"][0].as_str().unwrap().contains('→'));
    assert!(seen["maskKeys"]["texts"][0].as_str().unwrap().contains("query 2,048"));

    assert_eq!(seen["maskZoomed"], "queries 1,536 to 2,560, keys 1,536 to 2,560");
    assert_eq!((&seen["maskImages"], &seen["maskWholeImages"]), (&Value::from(1), &Value::from(0)));
    assert_eq!(seen["maskRedrawn"], true);
    assert_eq!(seen["maskWhole"], "all tokens");
    let zoomed = text(&seen, "maskZoomedTip");
    assert!(zoomed.starts_with("query 2,048: chunk 16") && zoomed.ends_with("\nunmasked"), "{zoomed}");

    for key in ["zoomWidens", "zoomMovesTicks", "dragMoves", "allRestores", "wheelZooms", "zeroRestores"] {
        assert_eq!(seen[key], true, "{key}: {seen}");
    }
    assert_eq!(seen["firstPage"], "all 4 ranks");
    assert_eq!(seen["hasNext"], false);

    let light = photograph("small", &html, 1280, 2600, false);
    let dark = photograph("small", &html, 1280, 2600, true);
    assert!(light.len() > 50_000 && dark.len() > 50_000, "{} and {} bytes", light.len(), dark.len());
    assert_ne!(light, dark, "the dark theme looks like the light one");
}

/// A phone's width.
const NARROW: usize = 360;

/// What the self-check saw on the page where it is narrow. Chromium's windows are at least 500 wide, so it goes into a frame.
fn seen_narrow(name: &str, html: &str) -> Value {
    let inner = format!("{name}-narrow-inner.html");
    let check = format!("<script>{}</script></body>", include_str!("self_check.js"));
    fs::write(folder().join(&inner), html.replace("</body>", &check)).unwrap();
    let asking = format!(
        "<!DOCTYPE html><body style='margin:0'><iframe id=f src='{inner}' style='width:{NARROW}px;height:4600px;border:0'>\
         </iframe><script>onload=()=>{{document.body.append(document.getElementById('f').contentDocument\
         .getElementById('seen').textContent)}}</script></body>"
    );
    let page = folder().join(format!("{name}-narrow.html"));
    fs::write(&page, asking).unwrap();
    let picture = folder().join(format!("{name}-{NARROW}-light.png"));
    let screenshot = format!("--screenshot={}", picture.display());
    chromium(&page, &[&screenshot, "--window-size=500,4600"]);
    assert!(fs::read(picture).unwrap().len() > 20_000);
    let dom = chromium(&page, &["--dump-dom", "--allow-file-access-from-files", "--window-size=600,900"]);
    let json = dom.split("</script>").nth(1).and_then(|rest| rest.split("</body>").next()).unwrap().trim();
    let json = json.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let seen: Value = serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {dom}"));
    assert_eq!(seen["error"], Value::Null);
    assert_eq!(seen["drawn"], "yes");
    assert!(seen["wideness"].as_i64().unwrap() <= 0, "wider than {NARROW}: {}", seen["wideness"]);
    seen
}

#[test]
fn a_narrow_screen_holds_the_page() {
    let mut run = four_documents();
    // A name that has no place to be broken at.
    run.figures.setup.push(("mask".to_owned(), format!("varlen-causal:lengths=@{}", "documents_".repeat(9))));
    let seen = seen_narrow("small", &run.report().render());
    assert_eq!(seen["areaBars"], 4);
    assert!(seen["spans"].as_u64().unwrap() > 20);
}

#[test]
fn one_of_many_passes_is_picked() {
    let run = four_documents();
    let [forward, backward] = &run.predicted;
    let policies = ["sequential", "concurrent+single-connection", "kernel-barrier", "concurrent+copy-engine"];
    let timelines = policies.iter().flat_map(|policy| {
        [(format!("forward, {policy}"), forward), (format!("backward, {policy}"), backward)]
    });
    let rows = policies.map(|policy| ["forward", policy, "2.5 ms"].map(str::to_owned).to_vec());
    let report = SimulationReport {
        title: "Predicted attention",
        setup: vec![("machine".to_owned(), "NVIDIA H200".to_owned())],
        columns: ["pass", "policy", "seconds"].map(str::to_owned).to_vec(),
        rows: rows.to_vec(),
        timelines: timelines.collect(),
        origin: None,
    };
    let html = report.render();
    assert_self_contained(&html);
    // Policies of a pass stand side by side, each with its parts.
    let bars = html.split("id=\"policies\"").nth(1).unwrap().split("</table>").next().unwrap();
    assert_eq!(bars.matches("<tr>").count(), 2 * policies.len(), "{bars}");
    assert!(bars.contains("<i class=\"compute\"") && bars.contains("<i class=\"communication\""), "{bars}");
    assert!(html.contains("<th scope=\"col\" class=\"text\">policy</th><th scope=\"col\">seconds</th>"));
    for seen in [seen("simulation", &html, 1280), seen_narrow("simulation", &html)] {
        assert_eq!(seen["spans"], forward.spans.len());
        assert_eq!(seen["pickedSpans"], backward.spans.len());
        assert_eq!(seen["pickedRows"], serde_json::json!(["backward, sequential, predicted"]));
    }
}

#[test]
fn a_million_tokens_on_64_ranks() {
    let run = Run::new(documents(lengths("packed_documents_lognormal_1m.txt")), 64, 512);
    let start = Instant::now();
    let html = run.report().render();
    println!("rendered {} bytes in {:?}", html.len(), start.elapsed());
    assert!(html.len() < 2_000_000, "{} bytes", html.len());
    assert_self_contained(&html);
    let seen = seen("million", &html, 1280);
    assert_eq!(seen["areaBars"], 64);
    assert_eq!(seen["rankRows"], 64);
    assert!(seen["cells"].as_u64().unwrap() > 64);
    assert!(seen["maskPaths"].as_u64().unwrap() >= 64);
    let lanes = seen["lanes"].as_u64().unwrap();
    assert!((16..=32).contains(&lanes), "{lanes} lanes");
    assert_eq!(seen["hasNext"], true);
    assert!(text(&seen, "secondPage").ends_with("of 64 ranks"), "{}", seen["secondPage"]);
    assert_ne!(seen["firstPage"], seen["secondPage"]);
    let seconds = |rank: usize| {
        run.measured[0].spans.iter().filter(|span| span.rank == rank).map(|span| span.end).fold(0.0, f64::max)
    };
    let slowest = (0..64).max_by(|&a, &b| seconds(a).total_cmp(&seconds(b)).then(b.cmp(&a))).unwrap();
    assert!(
        text(&seen, "slowestTip").contains(&format!("rank {slowest},")),
        "{slowest}: {}",
        seen["slowestTip"]
    );
    photograph("million", &html, 1280, 2900, true);
}

/// The page draws a closer look from the slices with sums of its own. Its pixels must show the same as the mask.
#[test]
fn a_closer_look_is_exact() {
    let range = Range::new;
    let slices = vec![
        AttnSlice::new(range(0, 300), range(0, 400), MaskType::Causal),
        AttnSlice::new(range(300, 700), range(100, 600), MaskType::BiCausal),
        AttnSlice::new(range(700, 1000), range(500, 900), MaskType::InvCausal),
        AttnSlice::new(range(40, 90), range(500, 720), MaskType::Full),
    ];
    let mask = Mask::new(1000, 1000, slices).unwrap();
    let run = Run::new(mask, 3, 100);
    let probe = "<script>{
        let canvas;
        const encode=HTMLCanvasElement.prototype.toDataURL;
        HTMLCanvasElement.prototype.toDataURL=function(){canvas=this;return encode.call(this)};
        document.querySelector('[data-mask=in]').click();
        const context=canvas.getContext('2d');
        const rows=[];
        for(let i=0;i<50;i++){let row='';for(let j=0;j<50;j++){
            const at=(n,of)=>Math.floor((n+.5)/50*of);
            const alpha=context.getImageData(at(j,canvas.width),at(i,canvas.height),1,1).data[3];
            row+=alpha===0?'0':alpha===255?'1':'?';}rows.push(row);}
        const pre=document.createElement('pre');pre.id='pixels';pre.textContent=rows.join(' ');document.body.append(pre);
        }</script></body>";
    let page = folder().join("closer-checked.html");
    fs::write(&page, run.report().render().replace("</body>", probe)).unwrap();
    let dom = chromium(&page, &["--dump-dom", "--window-size=1280,900"]);
    let text = dom.split("<pre id=\"pixels\">").nth(1).unwrap().split('<').next().unwrap();
    // The view is the middle half: tokens 250 to 750 on both axes, sampled every 10.
    let (mut compared, mut unmasked) = (0, 0);
    for (i, row) in text.split(' ').enumerate() {
        for (j, pixel) in row.chars().enumerate() {
            let at = |n: usize| 250.0 + (n as f64 + 0.5) * 10.0;
            let sees =
                |q: f64, k: f64| run.mask.slices().iter().any(|slice| slice.contains(q as usize, k as usize));
            // Next to an edge a pixel may belong to the neighbouring token.
            let around: Vec<bool> = [-2.0, 0.0, 2.0]
                .iter()
                .flat_map(|dq| [-2.0, 0.0, 2.0].map(|dk| sees(at(i) + dq, at(j) + dk)))
                .collect();
            if around.iter().all(|&a| a == around[0]) {
                assert_eq!(pixel, if around[0] { '1' } else { '0' }, "query {} key {}", at(i), at(j));
                compared += 1;
                unmasked += usize::from(around[0]);
            }
        }
    }
    assert!(
        compared > 2000 && unmasked > 300 && unmasked < compared - 300,
        "{compared} compared, {unmasked} unmasked"
    );
}

#[test]
fn a_million_tokens_closer_up() {
    let run = Run::new(documents(lengths("packed_documents_pareto_1m.txt")), 8, 512);
    let zoom = "<script>for(let i=0;i<4;i++)document.querySelector('[data-mask=in]').click()</script></body>";
    let html = run.report().render().replace("</body>", zoom);
    let page = folder().join("closer.html");
    fs::write(&page, html).unwrap();
    let dom = chromium(&page, &["--dump-dom"]);
    assert!(
        dom.contains("queries 491,520 to 557,056, keys 491,520 to 557,056"),
        "the view is somewhere else"
    );
}

#[test]
fn one_rank_exchanges_nothing() {
    let run = Run::new(documents([700, 324]), 1, 256);
    let html = run.report().render();
    let seen = seen("one", &html, 1280);
    assert_eq!(seen["areaBars"], 1);
    assert_eq!(seen["cells"], 0);
    assert_eq!(seen["cellTip"], Value::Null);
    assert!(html.contains("Nothing is exchanged"));
}

#[test]
fn forward_alone_and_predicted_alone() {
    let run = four_documents();
    let forward = Some(TimelinePair { predicted: Some(&run.predicted[0]), measured: None });
    let report =
        HtmlReport { forward, backward: None, check: None, figures: Figures::default(), ..run.report() };
    let html = report.render();
    let predicted = seen("predicted", &html, 1280);
    assert_eq!(predicted["spans"], run.predicted[0].spans.len());
    assert_eq!(predicted["backwardSpans"], Value::Null);
    assert_eq!(predicted["bytesPressed"], Value::Null);

    let report = HtmlReport { forward: None, ..report };
    let none = seen("no-timeline", &report.render(), 1280);
    assert_eq!(none["spans"], 0);
    assert_eq!(none["areaBars"], 4);
}

#[test]
fn many_ranks_and_cross_attention() {
    let (q, k) = (Range::new(0, 40_000), Range::new(0, 9_000));
    let mask = Mask::new(40_000, 9_000, vec![AttnSlice::new(q, k, MaskType::Full)]).unwrap();
    let run = Run::new(mask, 300, 64);
    let html = run.report().render();
    assert!(html.len() < 3_000_000, "{} bytes", html.len());
    let seen = seen("many", &html, 1280);
    assert_eq!(seen["areaBars"], 100);
    assert_eq!(seen["rankRows"], 300);
    assert!(seen["cells"].as_u64().unwrap() <= 64 * 64);
    assert!(text(&seen, "firstPage").contains(" ranks (selected from 300)"), "{}", seen["firstPage"]);
    assert!(text(&seen, "barTip").starts_with("ranks 0 to 2\n"), "{}", seen["barTip"]);
}

#[test]
fn the_largest_plan_is_drawn() {
    let once = lengths("packed_documents_lognormal_1m.txt");
    let four_million = once.iter().cycle().take(4 * once.len()).copied();
    let run = Run::new(documents(four_million), 4096, 512);
    let html = run.report().render();
    assert!(html.len() < 2_500_000, "{} bytes", html.len());
    let seen = seen("largest", &html, 1280);
    assert_eq!(seen["areaBars"], 128);
    assert_eq!(seen["rankRows"], 4096);
    assert!(text(&seen, "barTip").starts_with("ranks 0 to 31\n"), "{}", seen["barTip"]);
    assert!(text(&seen, "cellTip").contains("ranks 0 to 63 →"), "{}", seen["cellTip"]);
    assert!(text(&seen, "firstPage").ends_with("ranks (selected from 4,096)"), "{}", seen["firstPage"]);
}

/// A page says what made it, and what limits the run.
#[test]
fn a_report_says_where_it_came_from_and_what_limits_the_run() {
    let run = four_documents();
    let origin = Origin {
        command: "counterpoint attention --mask '<b>' --cp-size 4".to_owned(),
        version: "0.1.0".to_owned(),
        date: "2026-11-24T00:00:00Z".to_owned(),
        host: "node-7".to_owned(),
    };
    let html = HtmlReport { origin: Some(&origin), ..run.report() }.render();
    assert!(
        html.contains("<code>counterpoint attention --mask '&lt;b&gt;' --cp-size 4</code>")
            || html.contains("--mask &#39;&lt;b&gt;&#39;"),
        "{}",
        &html[..9000]
    );
    assert!(html.contains("counterpoint 0.1.0, on node-7, 2026-11-24T00:00:00Z"));
    let sentence = html.split("<p class=\"limits\">").nth(1).unwrap().split("</p>").next().unwrap();
    assert!(
        sentence.starts_with("What limits this run is ") && sentence.contains(" % of the "),
        "{sentence}"
    );
    assert!(!run.report().render().contains("class=\"origin\""), "nothing is said of what is not known");
}

#[test]
fn labels_cannot_become_markup() {
    let mut run = Run::new(documents([300]), 2, 128);
    for timeline in run.measured.iter_mut().chain(&mut run.predicted) {
        timeline.spans[0].label =
            "</script><script>document.documentElement.dataset.error='ran'</script><!--".into();
        timeline.streams[0] = "<b>compute</b>".into();
    }
    run.figures.setup.push(("a\"b".into(), "<img src=x onerror=alert(1)>".into()));
    let mut report = run.report();
    report.title = "</title><script>document.documentElement.dataset.error='ran'</script>";
    let seen = seen("hostile", &report.render(), 1280);
    assert!(text(&seen, "spanTip").contains("</script>"), "{}", seen["spanTip"]);
}
