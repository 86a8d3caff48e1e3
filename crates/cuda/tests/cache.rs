//! The cache of compiled kernels survives whatever happens to its folder. Needs NVRTC, no GPU.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use counterpoint_cuda::{
    Arch, CACHE_VARIABLE, CacheWarning, Cubin, CubinCache, CubinOrigin, KernelSource, kernel_source,
};

mod support;

fn source(name: &str) -> KernelSource {
    kernel_source(name, Arch::SM_90A)
        .line("#include \"types.cuh\"")
        .line(format_args!("extern \"C\" __global__ void {name}(float* x) {{ x[0] = counterpoint::kLn2; }}"))
}

/// Where kernels came from and what went wrong. What comes from the cache must be what was compiled: `seen` keeps that.
fn origins(cache: &CubinCache, seen: &mut Seen, names: &[&str]) -> Vec<(CubinOrigin, Option<CacheWarning>)> {
    let sources: Vec<_> = names.iter().map(|name| source(name)).collect();
    let found = cache.cubins(&sources.iter().collect::<Vec<_>>());
    let found = found.into_iter().zip(names).map(|(found, &name)| {
        let found = found.unwrap();
        assert!(found.cubin.log.contains("registers"), "{}", found.cubin.log);
        match found.origin {
            CubinOrigin::Compiled => drop(seen.insert(name.to_owned(), found.cubin)),
            CubinOrigin::Cache => assert!(seen[name] == found.cubin, "{name} is not what was compiled"),
        }
        (found.origin, found.warning)
    });
    found.collect()
}

type Seen = BTreeMap<String, Cubin>;

/// The entries' paths.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "cubin"));
    paths.sort();
    paths
}

const COMPILED: (CubinOrigin, Option<CacheWarning>) = (CubinOrigin::Compiled, None);
const CACHED: (CubinOrigin, Option<CacheWarning>) = (CubinOrigin::Cache, None);

#[test]
fn compiled_once() {
    if support::no_compiler() {
        return;
    }
    let (folder, mut seen) = (tempfile::tempdir().unwrap(), Seen::new());
    let cache = CubinCache::at(folder.path().join("made").join("when needed"));
    assert_eq!(cache.usage().entries, 0);
    assert_eq!(origins(&cache, &mut seen, &["a", "b", "a"]), [COMPILED, COMPILED, COMPILED]);
    assert_eq!(cache.usage().entries, 2);
    assert_eq!(origins(&cache, &mut seen, &["b", "c"]), [CACHED, COMPILED]);
    assert!(cache.cubins(&[]).is_empty());
    let broken = kernel_source("d", Arch::SM_90A).line("nonsense");
    assert!(cache.cubins(&[&broken])[0].is_err());
    assert_eq!(cache.usage().entries, 3, "errors are not kept");
}

#[test]
fn damage_is_repaired() {
    if support::no_compiler() {
        return;
    }
    let (folder, mut seen) = (tempfile::tempdir().unwrap(), Seen::new());
    let cache = CubinCache::at(folder.path());
    origins(&cache, &mut seen, &["a"]);
    let path = entries(folder.path()).remove(0);
    let whole = fs::read(&path).unwrap();
    let middle = whole.len() / 2;
    let mut flipped = whole.clone();
    flipped[middle] ^= 1;
    for damaged in [&whole[..middle], &whole[..10], &[], &flipped, &[whole.clone(), vec![0]].concat()] {
        fs::write(&path, damaged).unwrap();
        let found = origins(&cache, &mut seen, &["a"]).remove(0);
        let named = matches!(&found.1, Some(CacheWarning::Damaged { path: named, .. }) if *named == path);
        assert!(found.0 == CubinOrigin::Compiled && named, "{found:?}");
        assert_eq!(origins(&cache, &mut seen, &["a"]), [CACHED]);
        assert_eq!(entries(folder.path()).len(), 1);
    }
    // Something else in its place can neither be read nor replaced.
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let found = origins(&cache, &mut seen, &["a"]).remove(0);
    assert!(matches!(found.1, Some(CacheWarning::Unwritable { .. })), "{found:?}");
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// A file with a right checksum that someone else could have written is not what runs.
#[test]
fn what_others_could_have_written_is_compiled_again() {
    if support::no_compiler() {
        return;
    }
    let (outer, mut seen) = (tempfile::tempdir().unwrap(), Seen::new());
    let folder = outer.path().join("cache");
    let cache = CubinCache::at(&folder);
    origins(&cache, &mut seen, &["a"]);
    assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    let path = entries(&folder).remove(0);
    let whole = fs::read(&path).unwrap();
    let distrusted = |seen: &mut Seen, place: &Path, words: &str| {
        let began = Instant::now();
        let found = origins(&cache, seen, &["a"]).remove(0);
        assert!(began.elapsed().as_secs() < 30, "{words}: it waits");
        let Some(warning @ CacheWarning::Distrusted { path, .. }) = &found.1 else { panic!("{found:?}") };
        assert!(found.0 == CubinOrigin::Compiled && path == place, "{found:?}");
        assert!(warning.to_string().contains(words), "{warning}");
        // Said once, however many kernels it concerns.
        assert_eq!(cache.take_warnings().len(), 1);
        assert_eq!(cache.take_warnings(), []);
    };
    for mode in [0o666, 0o664, 0o646] {
        chmod(&path, mode);
        distrusted(&mut seen, &path, "others may write");
        assert_eq!(origins(&cache, &mut seen, &["a"]), [CACHED], "what was compiled takes its place");
    }
    let other = outer.path().join("other");
    fs::write(&other, &whole).unwrap();
    let [link, fifo, long]: [&dyn Fn(); 3] = [
        &|| std::os::unix::fs::symlink(&other, &path).unwrap(),
        &|| assert!(Command::new("mkfifo").arg(&path).status().unwrap().success()),
        &|| fs::File::create(&path).unwrap().set_len(1 << 40).unwrap(),
    ];
    for (make, words) in [(link, "not a regular"), (fifo, "not a regular"), (long, "more than")] {
        fs::remove_file(&path).unwrap();
        make();
        distrusted(&mut seen, &path, words);
        assert_eq!(origins(&cache, &mut seen, &["a"]), [CACHED]);
    }
    for mode in [0o777, 0o770, 0o1777] {
        chmod(&folder, mode);
        distrusted(&mut seen, &folder, "others may write");
    }
    // Only root can give files away.
    chmod(&folder, 0o755);
    if std::os::unix::fs::chown(&path, Some(4321), None).is_ok() {
        distrusted(&mut seen, &path, "belongs to user 4321");
        assert_eq!(origins(&cache, &mut seen, &["a"]), [CACHED]);
        std::os::unix::fs::chown(&folder, Some(4321), None).unwrap();
        distrusted(&mut seen, &folder, "belongs to user 4321");
        let (shared, _) = lines(spawn(&folder, "a", "export COUNTERPOINT_CACHE_OWNER=4321;"));
        assert!(shared[0].contains("Cache") && shared[0].trim_end().ends_with("bytes"), "{shared:?}");
        let (wrong, _) = lines(spawn(&folder, "a", "export COUNTERPOINT_CACHE_OWNER=someone;"));
        assert!(wrong[0].contains("Compiled"), "{wrong:?}");
    }
}

/// A folder that is filled by one user and only read by others: what is in it is used without a word.
#[test]
fn a_folder_is_shared_read_only() {
    if support::no_compiler() {
        return;
    }
    let (folder, mut seen) = (tempfile::tempdir().unwrap(), Seen::new());
    chmod(folder.path(), 0o755);
    let cache = CubinCache::at(folder.path());
    origins(&cache, &mut seen, &["a", "b"]);
    for entry in entries(folder.path()) {
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o644, "others may read it");
        chmod(&entry, 0o444);
    }
    chmod(folder.path(), 0o555);
    assert_eq!(origins(&cache, &mut seen, &["a", "b"]), [CACHED, CACHED]);
    assert_eq!(cache.take_warnings(), []);
    chmod(folder.path(), 0o755);
}

#[test]
fn a_folder_that_cannot_be_written_costs_only_time() {
    if support::no_compiler() {
        return;
    }
    let (folder, mut seen) = (tempfile::tempdir().unwrap(), Seen::new());
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    // A path through a file, a device, and a folder without permission: each refuses even a superuser, but the last.
    for place in [file.join("cache"), PathBuf::from("/dev/null"), PathBuf::from("/proc/cache")] {
        let found = origins(&CubinCache::at(&place), &mut seen, &["a"]).remove(0);
        let Some(CacheWarning::Unwritable { folder, reason }) = found.1 else { panic!("{:?}", found.1) };
        assert_eq!((found.0, folder), (CubinOrigin::Compiled, place));
        assert!(!reason.is_empty());
    }
    let closed = folder.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    assert_eq!(origins(&CubinCache::at(&closed), &mut seen, &["a"])[0].0, CubinOrigin::Compiled);
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Not a test by itself: what the processes of the tests below run.
#[test]
fn child() {
    let Ok(names) = std::env::var("CACHE_TEST_CHILD") else { return };
    let names: Vec<_> = names.split(',').collect();
    let start = Instant::now();
    for name in names {
        let found = CubinCache::from_environment().cubins(&[&source(name)]).remove(0).unwrap();
        let warning = found.warning.map_or(String::new(), |warning| warning.to_string());
        println!("\nchild: {name} {:?} {} bytes {warning}", found.origin, found.cubin.image.len());
    }
    println!("\nseconds: {}", start.elapsed().as_secs_f64());
}

/// A process that looks for kernels in a cache, under a shell that may set limits first.
fn spawn(folder: &Path, names: &str, limits: &str) -> std::process::Child {
    let program = std::env::current_exe().unwrap();
    Command::new("bash")
        .args(["-c", &format!("{limits} exec \"$0\" child --exact --nocapture"), program.to_str().unwrap()])
        .env("CACHE_TEST_CHILD", names)
        .env(CACHE_VARIABLE, folder)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

fn lines(child: std::process::Child) -> (Vec<String>, f64) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let text = String::from_utf8(output.stdout).unwrap();
    let seconds = text.lines().find_map(|line| line.strip_prefix("seconds: ")).unwrap().parse().unwrap();
    (text.lines().filter_map(|line| line.strip_prefix("child: ")).map(str::to_owned).collect(), seconds)
}

#[test]
fn processes_at_once() {
    if support::no_compiler() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let names = "a,b,c,d,e,f,g,h";
    let children: Vec<_> = (0..4).map(|_| spawn(folder.path(), names, "")).collect();
    for child in children {
        let (lines, _) = lines(child);
        assert_eq!(lines.len(), 8);
        assert!(lines.iter().all(|line| line.trim_end().ends_with("bytes")), "no warnings: {lines:?}");
    }
    assert_eq!(entries(folder.path()).len(), 8);
    let (lines, seconds) = lines(spawn(folder.path(), names, ""));
    assert!(lines.iter().all(|line| line.contains("Cache")), "{lines:?}");
    println!("8 cached kernels in a new process: {seconds:.4} s");
    let left = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let parts: Vec<_> = left.filter(|name| name.to_string_lossy().ends_with(".part")).collect();
    assert!(parts.is_empty(), "{parts:?}");
}

#[test]
fn a_full_disk_costs_only_time() {
    if support::no_compiler() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Files end after 1 KB, and going beyond is an error and no signal, as on a full disk.
    let (full, _) = lines(spawn(folder.path(), "a", "trap '' XFSZ; ulimit -f 1;"));
    assert!(full[0].contains("Compiled") && full[0].contains("cannot be kept"), "{full:?}");
    let left = entries(folder.path());
    assert!(left.is_empty(), "nothing half written: {left:?}");
    let (again, _) = lines(spawn(folder.path(), "a", ""));
    assert!(again[0].contains("Compiled") && !again[0].contains("cannot be kept"), "{again:?}");
}
