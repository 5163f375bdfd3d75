use std::collections::BTreeMap;

use super::layout::OwnTree;
use super::tree::hit_limit;
use super::v2::LEAF;
use super::*;

const LIMITS: CgroupLimits = CgroupLimits { memory_bytes: Some(64 << 20), cpu_millis: Some(1500), pids: Some(32) };

fn put(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Collects every file that is not part of the fixture, with its content.
fn written(dir: &Path, base: &Path, out: &mut Vec<String>) {
    let mut entries: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let shown = path.strip_prefix(base).unwrap().display().to_string();
        if path.is_dir() {
            written(&path, base, out);
        } else if shown.contains("sandpool-") {
            out.push(format!("{shown} = {}", fs::read_to_string(&path).unwrap()));
        }
    }
}

fn groups() -> Vec<Group> {
    let group = |name: &str, memory, cpu_millis| Group { name: name.into(), memory_bytes: Some(memory), cpu_millis };
    vec![group("g", 1 << 30, None), group("h", 1 << 29, Some(500))]
}

fn create_in(root: &Path) -> (Layout, Vec<String>) {
    let layout = Layout::find(root, OwnTree { pids: &[], scope: Some("server.scope") }, true);
    layout.tree("t").open().unwrap();
    layout.tree("t").create(&groups(), ("s", LIMITS), None).unwrap();
    let browser = CgroupLimits { memory_bytes: Some(48 << 20), cpu_millis: None, pids: Some(24) };
    layout.tree("t").create(&groups(), ("b", LIMITS), Some(browser)).unwrap();
    let mut out = Vec::new();
    written(&root.join("sys"), root, &mut out);
    (layout, out)
}

#[test]
fn v2_hangs_below_the_own_delegated_unit() {
    let root = crate::test_dir("cg2");
    put(&root, "proc/self/cgroup", "0::/user.slice/server.scope\n");
    put(&root, "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
    put(&root, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n");
    put(&root, "sys/fs/cgroup/user.slice/cgroup.controllers", "cpu memory pids\n");
    put(&root, "sys/fs/cgroup/user.slice/cgroup.subtree_control", "cpu memory pids\n");
    let unit = "sys/fs/cgroup/user.slice/server.scope";
    let files = [("type", "domain\n"), ("controllers", "cpu memory pids\n"), ("procs", ""), ("subtree_control", "")];
    files.iter().for_each(|(file, text)| put(&root, &format!("{unit}/cgroup.{file}"), text));
    let (layout, out) = create_in(&root);
    assert_eq!(layout.absent, BTreeMap::new());
    let enabled = fs::read_to_string(root.join(unit).join("cgroup.subtree_control")).unwrap();
    assert_eq!(enabled, "+memory +cpu +pids", "in one write");
    insta::assert_snapshot!(out.join("\n"), @r"
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/cgroup.subtree_control = +memory +cpu +pids
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/cgroup.subtree_control = +memory +cpu +pids
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/browser/memory.max = 50331648
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/browser/memory.swap.max = 0
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/browser/pids.max = 24
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/cgroup.subtree_control = +memory +cpu +pids
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/code/pids.max = 8
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/cpu.max = 150000 100000
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/memory.max = 67108864
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/memory.swap.max = 0
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/pids.max = 32
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/cgroup.subtree_control = +memory +cpu +pids
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/cpu.max = 50000 100000
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/memory.max = 536870912
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/memory.swap.max = 0
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/cpu.max = 150000 100000
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/memory.max = 67108864
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/memory.swap.max = 0
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/pids.max = 32
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/memory.max = 1073741824
    sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/memory.swap.max = 0
    ");
    let cgroup = layout.tree("t").sandbox(&groups(), "s", false);
    let code = cgroup.code();
    assert_eq!((code.tasks(), cgroup.browser()), (vec![], None));
    assert!(code.v2().unwrap().ends_with("server.scope/sandpool-t/g/h/s"));
    let split = layout.tree("t").sandbox(&groups(), "b", true);
    assert!(split.code().v2().unwrap().ends_with("server.scope/sandpool-t/g/h/b/code"));
    assert!(split.browser().unwrap().v2().unwrap().ends_with("server.scope/sandpool-t/g/h/b/browser"));
    put(
        &root,
        "sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/memory.events",
        "low 0\nhigh 0\noom 3\noom_kill 2\n",
    );
    assert_eq!((cgroup.usage().oom_kills, cgroup.usage().cpu_usec), (2, None));
    let stat = "sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/cpu.stat";
    put(&root, stat, "usage_usec 1234567\nuser_usec 1000000\nsystem_usec 234567\n");
    assert_eq!(cgroup.usage().cpu_usec, Some(1_234_567));
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn hybrid_takes_each_controller_from_where_it_is() {
    let root = crate::test_dir("hybrid");
    put(&root, "proc/self/cgroup", "4:memory:/box/a\n3:pids:/\n2:cpu,cpuacct:/\n1:name=systemd:/\n0::/\n");
    put(
        &root,
        "proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
         35 31 0:32 /box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
         41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    );
    for dir in ["cpu,cpuacct", "memory/a", "unified"] {
        fs::create_dir_all(root.join("sys/fs/cgroup").join(dir)).unwrap();
    }
    let (layout, out) = create_in(&root);
    insta::assert_snapshot!(out.join("\n"), @r"
    sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/b/cpu.cfs_period_us = 100000
    sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/b/cpu.cfs_quota_us = 150000
    sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/cpu.cfs_period_us = 100000
    sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/cpu.cfs_quota_us = 50000
    sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/s/cpu.cfs_period_us = 100000
    sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/s/cpu.cfs_quota_us = 150000
    sys/fs/cgroup/memory/a/sandpool-t/g/h/b/browser/memory.kmem.tcp.limit_in_bytes = 12582912
    sys/fs/cgroup/memory/a/sandpool-t/g/h/b/browser/memory.limit_in_bytes = 50331648
    sys/fs/cgroup/memory/a/sandpool-t/g/h/b/browser/memory.memsw.limit_in_bytes = 50331648
    sys/fs/cgroup/memory/a/sandpool-t/g/h/b/code/memory.kmem.tcp.limit_in_bytes = -1
    sys/fs/cgroup/memory/a/sandpool-t/g/h/b/memory.kmem.tcp.limit_in_bytes = 16777216
    sys/fs/cgroup/memory/a/sandpool-t/g/h/b/memory.limit_in_bytes = 67108864
    sys/fs/cgroup/memory/a/sandpool-t/g/h/b/memory.memsw.limit_in_bytes = 67108864
    sys/fs/cgroup/memory/a/sandpool-t/g/h/memory.kmem.tcp.limit_in_bytes = 134217728
    sys/fs/cgroup/memory/a/sandpool-t/g/h/memory.limit_in_bytes = 536870912
    sys/fs/cgroup/memory/a/sandpool-t/g/h/memory.memsw.limit_in_bytes = 536870912
    sys/fs/cgroup/memory/a/sandpool-t/g/h/s/memory.kmem.tcp.limit_in_bytes = 16777216
    sys/fs/cgroup/memory/a/sandpool-t/g/h/s/memory.limit_in_bytes = 67108864
    sys/fs/cgroup/memory/a/sandpool-t/g/h/s/memory.memsw.limit_in_bytes = 67108864
    sys/fs/cgroup/memory/a/sandpool-t/g/memory.kmem.tcp.limit_in_bytes = 268435456
    sys/fs/cgroup/memory/a/sandpool-t/g/memory.limit_in_bytes = 1073741824
    sys/fs/cgroup/memory/a/sandpool-t/g/memory.memsw.limit_in_bytes = 1073741824
    sys/fs/cgroup/memory/a/sandpool-t/memory.kmem.tcp.limit_in_bytes = -1
    ");
    assert_eq!(layout.absent[&Controller::Pids].why, "the cgroup v1 controller `pids` is not mounted");
    let split = layout.tree("t").sandbox(&groups(), "b", true);
    let (code, browser) = (split.code(), split.browser().unwrap());
    assert_eq!((code.tasks().len(), browser.tasks().len(), browser.v2()), (2, 2, None));
    assert!(browser.tasks()[0].ends_with("memory/a/sandpool-t/g/h/b/browser/tasks"));
    // On v1 each directory counts only its own kills.
    for (part, kills) in [("", 1), ("code", 2), ("browser", 4)] {
        let file = Path::new("sys/fs/cgroup/memory/a/sandpool-t/g/h/b").join(part).join("memory.oom_control");
        put(&root, file.to_str().unwrap(), &format!("oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"));
    }
    assert_eq!((split.usage().oom_kills, split.usage().browser_oom_kills), (3, 4));
    assert_eq!(split.usage().cpu_usec, None);
    put(&root, "sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/b/cpuacct.usage", "7654321999\n");
    assert_eq!(split.usage().cpu_usec, Some(7_654_321));
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn without_cgroups_each_controller_says_why_it_is_absent() {
    let root = crate::test_dir("nocg");
    put(&root, "proc/self/cgroup", "0::/\n");
    put(&root, "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    put(&root, "sys/fs/cgroup/cgroup.controllers", "\n");
    let layout = Layout::find(&root, OwnTree::default(), false);
    assert!(layout.hierarchies.is_empty());
    assert_eq!(layout.absent[&Controller::Memory].why, "cgroup v2 has no controller `memory` here");
    fs::remove_dir_all(root).unwrap();
}

/// Imitates a machine that has only v2. `own` is the path of the server's own cgroup; `cgroups` lists cgroups with
/// the content of their `cgroup.procs`.
fn unified(name: &str, own: &str, cgroups: &[(&str, &str)]) -> PathBuf {
    let root = crate::test_dir(name);
    put(&root, "proc/self/cgroup", &format!("0::{own}\n"));
    put(&root, "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
    for (dir, processes) in cgroups {
        let dir = format!("sys/fs/cgroup{dir}");
        put(&root, &format!("{dir}/cgroup.controllers"), "cpuset cpu io memory pids\n");
        put(&root, &format!("{dir}/cgroup.subtree_control"), "");
        put(&root, &format!("{dir}/cgroup.procs"), processes);
        if dir != "sys/fs/cgroup" {
            put(&root, &format!("{dir}/cgroup.type"), "domain\n");
        }
    }
    root
}

/// Marks a cgroup as delegated in the way systemd does, with a `trusted` attribute where the file system has no
/// `user` attributes.
fn delegate(root: &Path, dir: &str) {
    let path = root.join("sys/fs/cgroup").join(dir);
    let set = |name: &str| rustix::fs::setxattr(&path, name, b"1", rustix::fs::XattrFlags::empty());
    set("user.delegate").or_else(|_| set("trusted.delegate")).unwrap();
}

fn everything(dir: &Path) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let mut found: Vec<_> = entries
        .flat_map(|path| match path.is_dir() {
            true => [vec![(path.clone(), String::new())], everything(&path)].concat(),
            false => vec![(path.clone(), fs::read_to_string(&path).unwrap())],
        })
        .collect();
    found.sort();
    found
}

fn why(layout: &Layout) -> String {
    assert_eq!(layout.hierarchies, []);
    let Absence { why, what_to_do } = &layout.absent[&Controller::Memory];
    assert!(Controller::ALL.iter().all(|c| layout.absent[c] == layout.absent[&Controller::Memory]));
    format!("{why} → {what_to_do}")
}

const FOUR: Pid = Pid::from_raw(4).unwrap();

/// W38, W40, W46 of the hostile list.
#[test]
fn w38_a_cgroup_shared_with_others_is_left_as_it_is_and_none_above_it_is_taken() {
    let shared = ("/a.slice/server.service", "4\n7\n9\n");
    let unit = unified("w38", "/a.slice/server.service", &[("", ""), ("/a.slice", ""), shared]);
    delegate(&unit, "a.slice/server.service");
    let container = unified("w38c", "/", &[("", "4\n9\n")]);
    // A container sees this cgroup as the topmost, although it is not the root of the machine.
    put(&container, "sys/fs/cgroup/cgroup.type", "domain\n");
    let plain = unified("w38p", "/a/b", &[("", ""), ("/a", ""), ("/a/b", "0\n4\n")]);
    for (root, cgroup, who) in [
        (unit, "/a.slice/server.service", "process 9 bash"),
        (container, "/", "process 9 bash"),
        (plain, "/a/b", "process 0"),
    ] {
        put(&root, "proc/9/comm", "bash\n");
        put(&root, "proc/9/stat", "9 (ba) sh) S 1 9 9 0\n");
        put(&root, "proc/7/stat", "7 (pip) S 4 7 7 0\n");
        let before = everything(&root);
        for claim in [false, true] {
            let found = why(&Layout::find(&root, OwnTree { pids: &[FOUR], scope: None }, claim));
            let dir = root.join("sys/fs/cgroup").join(&cgroup[1..]);
            let dir = dir.display().to_string();
            let dir = dir.trim_end_matches('/');
            let expected = format!("other processes than the server's are in the cgroup `{dir}` ({who}) → ");
            assert!(found.replace("/`", "`").starts_with(&expected), "{found}\n{expected}");
            assert!(found.contains("alone in its cgroup") && !found.contains("writable"), "{found}");
            assert_eq!(everything(&root), before);
        }
        fs::remove_dir_all(root).unwrap();
    }
}

/// W40: a cgroup namespace without its own mount sees that of the host, whose root lies above the namespace's root.
#[test]
fn w40_a_mount_that_does_not_show_the_own_cgroup_is_not_used() {
    let root = unified("w40n", "/", &[("", "4\n")]);
    let mountinfo = "30 23 0:26 /../../.. /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    put(&root, "proc/self/mountinfo", mountinfo);
    let before = everything(&root);
    let found = why(&Layout::find(&root, OwnTree { pids: &[FOUR], scope: None }, true));
    assert!(found.contains("does not show the server's own cgroup"), "{found}");
    let own_mount = "31 30 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    put(&root, "proc/self/mountinfo", &[mountinfo, own_mount].concat());
    assert!(Layout::find(&root, OwnTree::default(), false).has(Controller::Memory));
    put(&root, "proc/self/mountinfo", mountinfo);
    assert_eq!(everything(&root), before);
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn w38_a_threaded_cgroup_and_one_without_memory_are_no_base() {
    let root = unified("w38t", "/a", &[("", ""), ("/a", "")]);
    put(&root, "sys/fs/cgroup/a/cgroup.type", "domain threaded\n");
    assert!(why(&Layout::find(&root, OwnTree::default(), true)).contains("is `domain threaded`"));
    put(&root, "sys/fs/cgroup/a/cgroup.type", "domain\n");
    put(&root, "sys/fs/cgroup/a/cgroup.controllers", "cpu pids\n");
    assert!(why(&Layout::find(&root, OwnTree::default(), true)).contains("`memory` is not delegated to"));
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn w38_looking_changes_nothing_and_a_claim_that_fails_is_taken_back() {
    let root = unified("w38l", "/a", &[("", ""), ("/a", "")]);
    let before = everything(&root);
    assert!(Layout::find(&root, OwnTree::default(), false).has(Controller::Memory));
    assert_eq!(everything(&root), before);
    // Writing to this directory fails, as does writing to a cgroup that another process has just entered.
    let control = root.join("sys/fs/cgroup/a/cgroup.subtree_control");
    fs::remove_file(&control).unwrap();
    fs::create_dir(&control).unwrap();
    let before = everything(&root);
    assert!(why(&Layout::find(&root, OwnTree::default(), true)).contains("cannot be used"));
    assert_eq!(everything(&root), before);
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn w38_what_was_claimed_is_taken_back_unless_somebody_has_come_to_need_it() {
    let root = unified("w38r", "/a", &[("", ""), ("/a", ""), ("/a/before", "")]);
    let before = everything(&root);
    let base = root.join("sys/fs/cgroup/a");
    let control = base.join("cgroup.subtree_control");
    let claim = || {
        fs::write(&control, "").unwrap();
        let layout = Layout::find(&root, OwnTree::default(), true);
        assert_eq!(fs::read_to_string(&control).unwrap(), "+memory +cpu +pids");
        // Imitates what the Linux kernel would store.
        fs::write(&control, "memory cpu pids\n").unwrap();
        layout
    };
    let layout = claim();
    fs::create_dir(base.join(LEAF)).unwrap();
    layout.release();
    assert_eq!(fs::read_to_string(&control).unwrap(), "-memory -cpu -pids");
    fs::write(&control, "").unwrap();
    assert_eq!(everything(&root), before);
    let layout = claim();
    fs::create_dir(base.join("since")).unwrap();
    layout.release();
    assert_eq!(fs::read_to_string(&control).unwrap(), "memory cpu pids\n");
    fs::remove_dir_all(root).unwrap();
}

/// W39: systemd ends a service if a process in or below its cgroup is killed for lack of memory, unless the cgroup
/// is delegated.
#[test]
fn w39_a_unit_that_is_not_delegated_is_not_used() {
    let own = "/system.slice/a.service";
    let root = unified("w39", own, &[("", ""), ("/system.slice", ""), (own, "4\n")]);
    let ours = OwnTree { pids: &[FOUR], scope: None };
    let before = everything(&root);
    assert_eq!(
        why(&Layout::find(&root, ours, true)),
        "the unit `a.service` is not delegated, so its cgroup belongs to systemd → set `Delegate=yes` in the unit"
    );
    assert_eq!(everything(&root), before);
    delegate(&root, &own[1..]);
    let found = Layout::find(&root, ours, false);
    assert_eq!(found.hierarchies[0].base, root.join("sys/fs/cgroup").join(&own[1..]));
    fs::remove_dir_all(root).unwrap();
}

/// W40: `DelegateSubgroup=` puts the server beside the place for its tree. Nothing above the unit is used.
#[test]
fn w40_a_tree_hangs_in_the_unit_and_never_above_it() {
    let cgroups =
        [("", ""), ("/system.slice", ""), ("/system.slice/a.service", ""), ("/system.slice/a.service/own", "4\n9\n")];
    let root = unified("w40", "/system.slice/a.service/own", &cgroups);
    delegate(&root, "system.slice/a.service");
    let unit = root.join("sys/fs/cgroup/system.slice/a.service");
    let found = Layout::find(&root, OwnTree { pids: &[FOUR], scope: None }, true);
    assert_eq!(found.hierarchies.iter().map(|h| &h.base).collect::<Vec<_>>(), [&unit]);
    put(&unit, "cgroup.procs", "9\n");
    put(&unit, "cgroup.subtree_control", "");
    let before = everything(&root);
    assert!(why(&Layout::find(&root, OwnTree { pids: &[FOUR], scope: None }, true)).contains("process 9"));
    assert_eq!(everything(&root), before);
    fs::remove_dir_all(root).unwrap();
}

/// W45: reports the limit that was hit, whether that of the sandbox or one around it, and none if it is uncertain.
#[test]
fn w45_a_kill_names_the_limit_that_was_hit() {
    let root = crate::test_dir("w45");
    let limits = |version, dirs: &[(&str, &str, &str)]| {
        let (limit, hits) = match version {
            Version::V1 => ("memory.limit_in_bytes", "memory.failcnt"),
            Version::V2 => ("memory.max", "memory.events.local"),
        };
        for (dir, bytes, hit) in dirs {
            put(&root, &format!("{dir}/{limit}"), &format!("{bytes}\n"));
            put(&root, &format!("{dir}/{hits}"), &format!("{hit}\n"));
        }
        hit_limit(version, &root.join("unit/group/box"))
    };
    let hit = "low 0\noom 1\noom_kill 1";
    let not = "low 0\noom 0\noom_kill 1";
    use Version::{V1, V2};
    assert_eq!(
        limits(V2, &[("unit", "250", hit), ("unit/group", "max", not), ("unit/group/box", "900", not)]),
        Some(250)
    );
    assert_eq!(limits(V2, &[("unit/group/box", "900", hit)]), Some(900));
    assert_eq!(limits(V2, &[("unit", "250", not), ("unit/group/box", "900", not)]), None, "above what can be seen");
    let none = "9223372036854771712";
    assert_eq!(
        limits(V1, &[("unit", none, "0"), ("unit/group", "800", "3"), ("unit/group/box", "900", "0")]),
        Some(800)
    );
    assert_eq!(limits(V1, &[("unit/group/box", "900", "1")]), Some(900), "the nearest");
    fs::remove_dir_all(root).unwrap();
}
