use super::*;
use crate::confine::ARRIVAL;
use crate::ids::{IdMap, Mode};
use crate::spec::{BrowserJail, Content, Host, SharedVolumeSpec, Volume};

fn spec(mode: Mode) -> JailSpec {
    let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect();
    let dir = PathBuf::from("/state/instances/i/s");
    JailSpec {
        map: IdMap::new(mode, 7, 100, 1001).unwrap(),
        host: Host {
            binds: paths(&["/usr", "/etc/ld.so.cache", "/etc/ssl/certs"]),
            symlinks: vec![("/bin".into(), "usr/bin".into()), ("/lib".into(), "usr/lib".into())],
            masked_files: paths(&["/proc/kcore", "/proc/keys"]),
            masked_dirs: paths(&["/proc/acpi"]),
            proc_files: vec![FileSpec { path: "/proc/vmstat".into(), content: Content::Text("pswpin 0\n".into()) }],
            read_only: paths(&["/proc/sys"]),
            ipv6: true,
            ptys: 8,
        },
        runtime: paths(&["/home/u/rt/node/bin", "/home/u/rt/node", "/usr/lib/python3", "/bin/sh", "/tmp/rt"]),
        files: vec![FileSpec { path: "/opt/sandpool/driver.py".into(), content: Content::Text("pass".into()) }],
        volume: match mode {
            Mode::Root => {
                Volume::Ext4 { template: "/state/templates/ext4-1.img".into(), image: dir.join("volume.img") }
            }
            Mode::Sub | Mode::Single => Volume::Tmpfs { bytes: 64 << 20, inodes: 1000 },
        },
        kept: None,
        kept_packages: None,
        shared: vec![],
        browser: None,
        egress: None,
        shm_bytes: 32 << 20,
        cgroup_tasks: if mode == Mode::Root { paths(&["/sys/fs/cgroup/pids/sandpool-t/g/s/tasks"]) } else { vec![] },
        processes: if mode == Mode::Root { None } else { Some(64) },
        dir,
        mount_point: "/state/instances/i/root".into(),
    }
}

#[test]
fn the_plan_of_each_mode_is_this_one() {
    insta::assert_snapshot!("plan_root", plan(&spec(Mode::Root)));
    insta::assert_snapshot!("plan_sub", plan(&spec(Mode::Sub)));
    insta::assert_snapshot!("plan_single", plan(&spec(Mode::Single)));
}

/// Returns a specification with all optional parts.
fn with_volumes(mode: Mode) -> JailSpec {
    let spec = spec(mode);
    let share =
        |host: &str, inside: &str, read_only| SharedVolumeSpec { host: host.into(), inside: inside.into(), read_only };
    let kept = match mode {
        Mode::Root => KeptVolumeSpec::Ext4 {
            template: Some("/state/templates/ext4-kept-1.img".into()),
            image: spec.dir.join("kept.img"),
        },
        Mode::Sub | Mode::Single => KeptVolumeSpec::Memory { at: "/state/instances/i/kept/0af9".into() },
    };
    let shared = vec![share("/srv/in", "/shared/in", true), share("/srv/out", "/shared/out", false)];
    JailSpec { kept: Some(kept), shared, egress: Some("127.0.0.1:3128".parse().unwrap()), ..spec }
}

/// Returns the steps that differ between the plans with and without the optional parts.
fn difference(mode: Mode) -> String {
    difference_to(mode, &with_volumes(mode))
}

fn difference_to(mode: Mode, with: &JailSpec) -> String {
    let lines = |spec: &JailSpec| plan(spec).to_string().lines().map(str::to_owned).collect::<Vec<_>>();
    let (without, with) = (lines(&spec(mode)), lines(with));
    let gone = without.iter().filter(|l| !with.contains(l)).map(|l| format!("- {l}"));
    let new = with.iter().filter(|l| !without.contains(l)).map(|l| format!("+ {l}"));
    gone.chain(new).collect::<Vec<_>>().join("\n")
}

#[test]
fn shared_and_kept_volumes_and_an_egress_change_the_plan_like_this() {
    insta::assert_snapshot!(difference(Mode::Root), @r"
    -   root tmpfs 2105344 bytes 281 inodes on /state/instances/i/root
    -   volume dir /data 755
    - volume dir /data owner 1879048199
    - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
    - seccomp
    +   root tmpfs 2105344 bytes 287 inodes on /state/instances/i/root
    +   dir /shared 755
    +   dir /shared/in 755
    +   dir /shared/out 755
    + listen 127.0.0.1:3128, hand out
    + kept ext4 /state/instances/i/s/kept.img from /state/templates/ext4-kept-1.img
    + kept dir /data shown as 1879048199
    + hide kept
    + hold /data
    + share /srv/in on /shared/in ro,nosuid,nodev shown as 1879048199
    + share /srv/out on /shared/out rw,nosuid,nodev shown as 1879048199
    + landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr /shared/in write /shared/out
    + seccomp without set-uid files
    ");
    insta::assert_snapshot!(difference(Mode::Sub), @r"
    -   root tmpfs 2105344 bytes 281 inodes on /state/instances/i/root
    -   volume dir /data 755
    - volume dir /data owner 8
    - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
    - seccomp
    +   root tmpfs 2105344 bytes 287 inodes on /state/instances/i/root
    +   dir /shared 755
    +   dir /shared/in 755
    +   dir /shared/out 755
    + listen 127.0.0.1:3128, hand out
    + kept /state/instances/i/kept/0af9 on /data owner 8
    + share /srv/in on /shared/in ro,nosuid,nodev
    + share /srv/out on /shared/out rw,nosuid,nodev
    + landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr /shared/in write /shared/out
    + seccomp without set-uid files
    ");
    assert_eq!(difference(Mode::Single), difference(Mode::Sub).replace("owner 8", "owner 0"));
}

fn with_browser(mode: Mode) -> JailSpec {
    let spec = spec(mode);
    let map = if mode == Mode::Single { spec.map } else { spec.map.with_browser(8, 100).unwrap() };
    JailSpec { map, browser: Some(BrowserJail { processes: spec.processes.map(|_| 32) }), ..spec }
}

#[test]
fn room_for_a_browser_changes_the_plan_like_this() {
    insta::assert_snapshot!(difference_to(Mode::Root, &with_browser(Mode::Root)), @r"
    -   file /etc/passwd 88 bytes
    -   file /etc/group 33 bytes
    -   volume dir /workspace 755
    -   volume dir /data 755
    - unshare user as 1879048199, map 1000 1879048199 1
    - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
    +   file /etc/passwd 136 bytes
    +   file /etc/group 49 bytes
    +   dir /browser 755
    +   dir /uploads 755
    +   volume dir /workspace 711
    +   volume dir /data 700
    +   volume dir /browser 700
    +   volume dir /uploads 750
    + volume dir /browser owner 1879048200
    + volume dir /uploads owner 1879048199:1879048200
    + dir /workspace/downloads 770 owner 1879048199:1879048200
    + unshare user as 1879048199, map 1000 1879048199 1, 1001 1879048200 1
    + landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr write /uploads
    ");
    insta::assert_snapshot!(difference_to(Mode::Single, &with_browser(Mode::Single)), @r"
    -   volume dir /workspace 755
    -   volume dir /data 755
    - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
    +   dir /browser 755
    +   dir /uploads 755
    +   volume dir /workspace 711
    +   volume dir /data 700
    +   volume dir /browser 700
    +   volume dir /uploads 750
    + volume dir /browser owner 0
    + volume dir /uploads owner 0
    + dir /workspace/downloads 770 owner 0:0
    + landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr write /uploads
    ");
    let reserved = |inside: &str| {
        let shared = vec![SharedVolumeSpec { host: "/srv".into(), inside: inside.into(), read_only: true }];
        JailSpec { shared, ..with_browser(Mode::Root) }.check().is_err()
    };
    assert!(reserved("/browser") && reserved("/uploads/x") && !reserved("/browsers"));
}

#[test]
fn a_browser_gives_up_what_the_guest_gave_up_and_more() {
    let steps = |mode| {
        let steps = browser_entry(&with_browser(mode)).unwrap();
        steps.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(steps(Mode::Root), @r"
    drop groups
    uid and gid 1001
    new session keyring
    rlimits
    not dumpable
    drop capabilities
    no new privileges
    landlock of a browser /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
    seccomp of a browser
    ");
    insta::assert_snapshot!(steps(Mode::Single), @r"
    uid and gid 1000
    new session keyring
    rlimits, 64 processes
    not dumpable
    drop capabilities
    no new privileges
    landlock of a browser /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
    seccomp of a browser
    ");
    assert_eq!(browser_entry(&spec(Mode::Root)), None);
}

#[test]
fn a_shared_directory_hides_nothing_and_nothing_is_made_in_it() {
    for inside in [
        "/",
        "shared",
        "/shared/../etc",
        "/proc/x",
        "/dev/shm",
        "/workspace/../etc",
        "/etc/x",
        "/tmp",
        "/tmp/rt",
        "/tmp/rt/x",
        "/usr/local/x",
        "/bin",
        "/opt",
        "/opt/sandpool/driver.py/x",
        "/home",
        "/home/u/rt/node/x",
        "/.volume",
        "/.kept",
    ] {
        let shared = vec![SharedVolumeSpec { host: "/srv".into(), inside: inside.into(), read_only: false }];
        let spec = JailSpec { shared, ..spec(Mode::Root) };
        assert!(spec.check().is_err(), "{inside}");
    }
    let mut spec = with_volumes(Mode::Root);
    assert_eq!(spec.check(), Ok(()));
    spec.shared[1].inside = "/shared/in/deeper".into();
    assert!(spec.check().is_err());
}

#[test]
fn a_shared_directory_may_be_on_the_volume_or_replace_a_part_of_it() {
    let share = |inside: &str| SharedVolumeSpec { host: "/srv".into(), inside: inside.into(), read_only: false };
    let of = |insides: &[&str], spec: JailSpec| JailSpec { shared: insides.iter().map(|i| share(i)).collect(), ..spec };
    let good = of(&["/workspace", "/data/a/b", "/data/a/c", "/tmp/x"], spec(Mode::Root));
    assert_eq!(good.check(), Ok(()));
    insta::assert_snapshot!(difference_to(Mode::Root, &good), @r"
    -   root tmpfs 2105344 bytes 281 inodes on /state/instances/i/root
    - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
    - seccomp
    +   root tmpfs 2105344 bytes 294 inodes on /state/instances/i/root
    + dir /data/a 755 owner 1879048199:1879048199
    + dir /data/a/b 755 owner 1879048199:1879048199
    + dir /data/a/c 755 owner 1879048199:1879048199
    + dir /tmp/x 755 owner 1879048199:1879048199
    + share /srv on /workspace rw,nosuid,nodev shown as 1879048199
    + share /srv on /data/a/b rw,nosuid,nodev shown as 1879048199
    + share /srv on /data/a/c rw,nosuid,nodev shown as 1879048199
    + share /srv on /tmp/x rw,nosuid,nodev shown as 1879048199
    + landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr write /workspace write /data/a/b write /data/a/c write /tmp/x
    + seccomp without set-uid files
    ");
    // Code can remove the packages in its workspace, so they are created again.
    let packages = SharedVolumeSpec { host: "/srv/.sandpool/packages".into(), ..share("/tmp/.packages") };
    let kept = |read_only| {
        let workspace = SharedVolumeSpec { read_only, ..share("/workspace") };
        let spec = JailSpec { shared: vec![workspace, packages.clone()], ..spec(Mode::Root) };
        plan(&spec).ops.into_iter().filter(|op| op.to_string().contains("on /tmp/.packages")).collect::<Vec<_>>()
    };
    let (workspace, owner) = (PathBuf::from("/srv"), spec(Mode::Root).map.remapped());
    assert_eq!(kept(false), [Op::SharePackages { workspace, shared: packages.clone(), owner }]);
    assert_eq!(kept(true), [Op::Share { shared: packages.clone(), owner }]);
    // Nothing is shown in another shared directory, on the kept volume, or where the browser puts its downloads.
    assert!(of(&["/workspace", "/workspace/x"], spec(Mode::Root)).check().is_err());
    assert!(of(&["/data/x"], with_volumes(Mode::Root)).check().is_err());
    assert_eq!(of(&["/workspace/x"], with_volumes(Mode::Root)).check(), Ok(()));
    assert!(of(&["/workspace/downloads"], with_browser(Mode::Root)).check().is_err());
    let beside = of(&["/workspace"], with_browser(Mode::Root));
    assert_eq!(beside.check(), Ok(()));
    assert!(plan(&beside).to_string().contains("dir /tmp/downloads 770 owner "), "the browser is another user");
    assert!(of(&["/workspace", "/tmp/downloads"], with_browser(Mode::Root)).check().is_err());
}

#[test]
fn nothing_of_the_host_is_shown_over_the_sandboxs_own_parts() {
    for path in ["/", "relative", "/usr/../etc", "/proc/sys", "/dev", "/workspace/x", "/tmp", "/etc/shadow"] {
        let spec = JailSpec { runtime: vec![path.into()], ..spec(Mode::Root) };
        assert!(spec.check().is_err(), "{path}");
    }
    assert_eq!(spec(Mode::Root).check(), Ok(()));
}

#[test]
fn a_forked_kernel_gives_up_what_the_guest_gave_up_in_the_same_order() {
    // The exceptions: a kernel is in a new session from the start, and it differs in who may inspect it.
    let differs = |own: &ConfineStep| {
        matches!(
            own,
            ConfineStep::Session | ConfineStep::NotDumpable | ConfineStep::Dumpable | ConfineStep::OfferToOomKiller
        )
    };
    for mode in [Mode::Root, Mode::Sub, Mode::Single] {
        let spec = with_volumes(mode);
        let own = |op| if let Op::Confine(own) = op { Some(own) } else { None };
        let guest: Vec<ConfineStep> = plan(&spec).ops.into_iter().filter_map(own).filter(|own| !differs(own)).collect();
        let kernel: Vec<ConfineStep> = entry(&spec).into_iter().filter(|own| !differs(own)).collect();
        assert_eq!(kernel, guest, "{mode}");
        // All of these steps are applied before the kernel is created inside; there it only becomes dumpable and a
        // target of the memory killer.
        assert_eq!(entry(&spec).last(), Some(&ConfineStep::Seccomp { profile: Profile::CodeOnHostFiles }));
        assert!(ARRIVAL.iter().all(differs));
    }
}

#[test]
fn privileges_end_after_the_last_mount_and_the_guest_is_last() {
    for mode in [Mode::Root, Mode::Sub, Mode::Single] {
        let ops = plan(&with_volumes(mode)).ops;
        let user = ops.iter().position(|op| matches!(op, Op::UserNamespace(_))).unwrap();
        let seal = ops.iter().position(|op| *op == Op::SealRoot).unwrap();
        assert!(seal < user);
        assert_eq!(ops.last(), Some(&Op::Exec));
        assert_eq!(ops[ops.len() - 2], Op::Confine(ConfineStep::Seccomp { profile: Profile::CodeOnHostFiles }));
    }
}
