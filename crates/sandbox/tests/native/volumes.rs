//! Directories of the host that sandboxes share, and data that outlives them.

use super::*;

#[tokio::test]
async fn a_shared_directory_is_the_sandboxs_inside_and_its_owners_outside() {
    if !root() {
        return;
    }
    let place = Place::new("shared");
    let (rw, ro) = (owned(&place, "rw", 4321), owned(&place, "ro", 4321));
    let put = |path: &Path, mode: u32, owner: u32| {
        fs::write(path, "theirs\n").unwrap();
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(path, Some(owner), Some(owner)).unwrap();
    };
    put(&rw.join("theirs"), 0o600, 4321);
    put(&rw.join("strangers"), 0o644, 5555);
    put(&ro.join("theirs"), 0o600, 4321);
    let below = Mounted::new("tmpfs", &ro.join("below"), 4321);
    put(&ro.join("below/theirs"), 0o666, 4321);
    let proc = Mounted::proc(&owned(&place, "rw/proc", 4321));
    let writable = Mounted::new("tmpfs", &rw.join("below"), 4321);
    let plain = Mounted::new("ramfs", &place.0.join("plain"), 4321);
    let config = NativeConfig { spares: 0, ..config(&place.0) };
    let (native, isolation) = Native::start(spawn_launcher_from(&helper()).unwrap(), config).await.unwrap();
    let before = Left::count(&place.0);
    let volumes = vec![
        share(&rw, "/shared/rw", false),
        share(&ro, "/shared/ro", true),
        share(&place.0.join("plain"), "/shared/plain", false),
        share(Path::new("/etc"), "/shared/etc", true),
    ];
    let sandbox = native.create(&SandboxSpec { volumes, ..spec() }).await.unwrap();

    let seen = sh(&*sandbox, "cd /shared/rw; stat -c '%u %g %n' theirs strangers; cat theirs strangers").await;
    assert_eq!(seen, "1000 1000 theirs\n65534 65534 strangers\ntheirs\ntheirs\n");
    let made = sh(&*sandbox, "cd /shared/rw; echo x >> theirs; mkdir d; echo y > d/ours; stat -c %u d/ours").await;
    assert_eq!(made, "1000\n");
    assert_eq!(fs::read_to_string(rw.join("theirs")).unwrap(), "theirs\nx\n");
    assert_eq!((owner(&rw.join("d")), owner(&rw.join("d/ours"))), (4321, 4321));
    assert_eq!(sh(&*sandbox, "cd /shared/ro; cat theirs below/theirs").await, "theirs\ntheirs\n");
    // What is mounted below is shown with the same owners, but no `proc` of the host.
    let seen = sh(&*sandbox, "cd /shared/rw; ls -A proc; echo x > below/ours; stat -c %u below/ours").await;
    assert_eq!(seen, "1000\n");
    assert_eq!(owner(&rw.join("below/ours")), 4321);
    // W72: a directory that is removed takes away what the host has mounted on it.
    let kept =
        sh(&*sandbox, "cd /shared/rw; (rmdir proc || mv proc elsewhere || mv -T below proc) 2>/dev/null || echo kept")
            .await;
    assert_eq!(kept, "kept\n");
    assert!(rw.join("proc/boot_id").exists());
    // Other users of the host could execute a set-uid file as its owner.
    let line = "cd /shared/rw; touch a; chmod 755 a; for mode in 4755 2755 6755; do chmod $mode a; \
                python3 -c \"import os; os.mknod('b', 0o$mode)\"; \
                python3 -c \"import os; os.open('c', os.O_CREAT | os.O_WRONLY, 0o$mode)\"; done 2>/dev/null; \
                stat -c '%a %n' *; rm a";
    let left = sh(&*sandbox, line).await;
    assert!(left.starts_with("755 a\n") && !left.contains(" b\n") && !left.contains(" c\n"), "{left}");
    // W70: the mode of a new file that a filter does not see, and an access control list in place of `chmod`.
    let program = "import ctypes, os, struct; libc = ctypes.CDLL(None); os.umask(0)\n\
                   fd = libc.syscall(437, -100, b'g', struct.pack('QQQ', os.O_CREAT | os.O_RDWR, 0o2644, 0), 24)\n\
                   print(os.write(fd, b'code'))\n\
                   rights = b''.join(struct.pack('<HHI', who, 7, 2**32 - 1) for who in (1, 4, 32))\n\
                   try: os.setxattr('g', 'system.posix_acl_access', struct.pack('<I', 2) + rights)\n\
                   except OSError as e: print(e.strerror)\n\
                   print(oct(os.stat('g').st_mode & 0o2010))\n";
    fs::write(rw.join("gid.py"), program).unwrap();
    fs::set_permissions(rw.join("gid.py"), std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let said = sh(&*sandbox, "cd /shared/rw; python3 gid.py; rm -f g").await;
    assert_eq!(said, "4\nOperation not supported\n0o2000\n");
    fs::remove_file(rw.join("gid.py")).unwrap();
    for refused in [
        "echo x > /shared/rw/strangers",
        "mv /shared/rw /shared/x",
        "touch /shared/ro/x",
        "echo x >> /shared/ro/theirs",
        "rm -f /shared/ro/theirs",
        "echo x > /shared/ro/below/theirs",
        "touch /shared/ro/below/x",
        "touch /shared/x",
        "cat /shared/etc/shadow",
        "mknod /shared/rw/null c 1 3",
        "cd /shared/rw/../../..; ls root",
    ] {
        let said = sh(&*sandbox, &format!("{refused} 2>/dev/null && echo DONE")).await;
        assert!(!said.contains("DONE"), "`{refused}` worked");
    }
    assert_eq!(sh(&*sandbox, "cat /shared/etc/passwd").await, fs::read_to_string("/etc/passwd").unwrap());
    let mounts = sh(&*sandbox, "grep ' /shared/' /proc/self/mountinfo").await;
    assert_eq!(mounts.lines().count(), 7, "{mounts}");
    assert!(mounts.lines().all(|line| line.contains("nosuid,nodev")), "{mounts}");

    // No file system of a host's that takes part in mapping.
    let notes: Vec<_> = sandbox.isolation().missing.iter().filter(|l| l.contains("/shared/plain")).collect();
    assert_eq!(notes.len(), 1, "{:?}", sandbox.isolation());
    assert_eq!(sandbox.isolation().level, isolation.level);
    assert_eq!(sh(&*sandbox, "echo x > /shared/plain/ours; stat -c %u /shared/plain/ours").await, "1000\n");
    assert!(owner(&place.0.join("plain/ours")) >= jail::ids::ROOT_BASE);
    sandbox.destroy().await.unwrap();
    fs::remove_dir_all(rw.join("d")).unwrap();
    fs::remove_file(place.0.join("plain/ours")).unwrap();
    fs::remove_file(rw.join("below/ours")).unwrap();
    assert_eq!(Left::count(&place.0), before);
    drop((below, plain, proc, writable));
    native.shutdown().await;
}

/// A shared directory in the workspace, in place of it, and below `/tmp`: symlinks in it lead nowhere but into the
/// sandbox, devices and set-uid programs in it have no effect, and code cannot move or remove it.
#[tokio::test]
async fn a_shared_directory_in_the_workspace_leads_nowhere_else() {
    if !root() {
        return;
    }
    let place = Place::new("in-workspace");
    let dir = owned(&place, "project", 4321);
    let secret = place.0.join("secret");
    fs::write(&secret, "secret\n").unwrap();
    fs::write(dir.join("f"), "theirs\n").unwrap();
    fs::set_permissions(dir.join("f"), std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    std::os::unix::fs::symlink(&secret, dir.join("absolute")).unwrap();
    std::os::unix::fs::symlink("../secret", dir.join("relative")).unwrap();
    std::os::unix::fs::symlink("/proc/1/root", dir.join("proc")).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", dir.join("hostname")).unwrap();
    fs::copy("/bin/cat", dir.join("cat")).unwrap();
    fs::set_permissions(dir.join("cat"), std::os::unix::fs::PermissionsExt::from_mode(0o4755)).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.join("null"),
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::Mode::from_raw_mode(0o666),
        rustix::fs::makedev(1, 3),
    )
    .unwrap();
    let native = start(&place.0).await;
    for (inside, read_only) in
        [("/workspace/p/project", true), ("/workspace", false), ("/data", true), ("/tmp/x/y", false), ("/mnt/p", true)]
    {
        let volumes = vec![share(&dir, inside, read_only)];
        let sandbox = native.create(&SandboxSpec { volumes, ..spec() }).await.unwrap();
        let seen = sh(&*sandbox, &format!("cd {inside}; cat f hostname; ./cat /proc/self/status | grep ^Uid")).await;
        assert_eq!(seen, "theirs\nsandbox\nUid:\t1000\t1000\t1000\t1000\n", "{inside}");
        for refused in [
            "cat absolute",
            "cat relative",
            "ls proc/etc",
            "cat proc/etc/shadow",
            "cat null",
            "cat ../../../../secret",
            "mv {} {}x",
            "rmdir {}",
            "mount -o remount,rw,suid,dev {}",
            "umount {}",
        ] {
            let refused = refused.replace("{}", inside);
            let said = sh(&*sandbox, &format!("cd {inside}; {refused} >/dev/null 2>&1 && echo DONE")).await;
            assert!(!said.contains("DONE"), "`{refused}` worked at {inside}");
        }
        let wrote = sh(&*sandbox, &format!("echo x 2>/dev/null > {inside}/new && echo DONE; rm -f {inside}/new")).await;
        assert_eq!(wrote.contains("DONE"), !read_only, "{inside}");
        let mounts = sh(&*sandbox, &format!("grep ' {inside} ' /proc/self/mountinfo | tail -n 1")).await;
        assert!(mounts.contains("nosuid,nodev"), "{mounts}");
        // The rest of the volume is as writable as without a mount.
        let rest = "for d in /workspace /data /tmp; do touch $d/.t 2>/dev/null && echo $d && rm $d/.t; done";
        let writable: Vec<&str> =
            ["/workspace", "/data", "/tmp"].into_iter().filter(|d| *d != inside || !read_only).collect();
        assert_eq!(sh(&*sandbox, rest).await.lines().collect::<Vec<_>>(), writable, "{inside}");
        sandbox.destroy().await.unwrap();
    }
    assert_eq!(owner(&dir), 4321);
    native.shutdown().await;
}

/// Code that may write to one shared directory cannot make another one lead elsewhere.
#[tokio::test]
async fn a_shared_directory_that_became_a_symlink_is_refused() {
    if !root() {
        return;
    }
    let place = Place::new("replaced");
    let outer = owned(&place, "outer", 4321);
    owned(&place, "outer/inner/deep", 4321);
    std::os::unix::fs::chown(outer.join("inner"), Some(4321), Some(4321)).unwrap();
    let native = start_without_spares(&place.0).await;
    let attacker = SandboxSpec { volumes: vec![share(&outer, "/workspace", false)], ..spec() };
    let sandbox = native.create(&attacker).await.unwrap();
    let line = "mv inner moved && ln -s /etc inner && mkdir -p moved/ssl && readlink inner";
    assert_eq!(sh(&*sandbox, &format!("cd /workspace; {line}")).await, "/etc\n");
    for below in ["inner", "inner/ssl"] {
        let volumes = vec![share(&outer.join(below), "/workspace/x", true)];
        let made = native.create(&SandboxSpec { volumes, ..spec() }).await.err();
        let Some(BackendError::Create(message)) = made else { panic!("{below}: {made:?}") };
        assert!(message.contains("Too many levels of symbolic links"), "{message}");
    }
    sandbox.destroy().await.unwrap();
    native.shutdown().await;
}

/// Code can do what it likes to the packages in its workspace: the next sandbox is created, and none of it leads outside.
#[tokio::test]
async fn w66_packages_in_a_shared_workspace_are_created_again_or_left_out() {
    if !root() {
        return;
    }
    let place = Place::new("packages");
    let (project, outside) = (owned(&place, "project", 4321), owned(&place, "outside", 4321));
    let native = start_without_spares(&place.0).await;
    let packages = share(&project.join(sandbox::SHARED_PACKAGES), "/tmp/.packages", false);
    let spec = SandboxSpec { volumes: vec![share(&project, "/workspace", false), packages], ..spec() };
    let seen = "cd /workspace; stat -c %u .sandpool/packages; cat .sandpool/.gitignore; echo x > /tmp/.packages/f; \
                cat .sandpool/packages/f";
    // `None`: the directory is there. Otherwise: why it is left out.
    for (attack, why) in [
        ("true", None),
        ("rm -rf .sandpool", None),
        ("rm -rf .sandpool/packages", None),
        ("rm -rf .sandpool; ln -s /tmp .sandpool", Some("Not a directory")),
        (&format!("rm .sandpool; ln -s {} .sandpool", outside.display()), Some("Not a directory")),
        ("rm .sandpool; mkdir .sandpool; ln -s /etc .sandpool/packages", Some("Not a directory")),
        ("rm -rf .sandpool; echo x > .sandpool", Some("Not a directory")),
        ("rm -rf .sandpool", None),
        ("chmod 0 .sandpool/packages .sandpool", Some("Permission denied")),
        ("chmod 755 .sandpool; chmod 755 .sandpool/packages; rm -rf .sandpool; chmod 555 .", Some("Permission denied")),
        ("chmod 755 .", None),
    ] {
        let before = native.create(&spec).await.unwrap();
        sh(&*before, &format!("cd /workspace; {attack}")).await;
        before.destroy().await.unwrap();
        let after = native.create(&spec).await.unwrap_or_else(|error| panic!("{attack}: {error}"));
        let missing = after.isolation().missing.join("\n");
        match why {
            None => assert_eq!(sh(&*after, seen).await, "1000\n*\nx\n", "{attack}: {missing}"),
            Some(why) => {
                assert_eq!(sh(&*after, "echo x > /tmp/.packages/f; cat /tmp/.packages/f").await, "x\n", "{attack}");
                let note = format!("`/workspace/.sandpool/packages` cannot be used for packages ({why}");
                assert!(missing.contains(&note) && !missing.contains("4321"), "{attack}: {missing}");
            }
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "{attack}");
        after.destroy().await.unwrap();
    }
    assert_eq!(owner(&project.join(".sandpool/.gitignore")), 4321);
    native.shutdown().await;
}

#[tokio::test]
async fn what_cannot_be_shared_is_refused_with_a_reason() {
    if !root() {
        return;
    }
    let place = Place::new("unshared");
    let good = owned(&place, "good", 4321);
    let roots = owned(&place, "roots", 0);
    std::os::unix::fs::symlink(&good, place.0.join("link")).unwrap();
    fs::create_dir(good.join("d")).unwrap();
    fs::write(place.0.join("file"), "").unwrap();
    let native = start_without_spares(&place.0).await;
    let before = Left::count(&place.0);
    for (host, inside, read_only, why) in [
        (place.0.join("missing"), "/shared", false, "No such file or directory"),
        (place.0.join("file"), "/shared", false, "Not a directory"),
        (place.0.join("link"), "/shared", false, "Too many levels of symbolic links"),
        (place.0.join("link/d"), "/shared", true, "Too many levels of symbolic links"),
        (roots, "/shared", false, "belongs to root"),
        (place.0.join("state"), "/shared", true, "holds the server's own files"),
        (place.0.join("state/instances"), "/shared", true, "holds the server's own files"),
        (place.0.clone(), "/shared", true, "holds the server's own files"),
        (good.clone(), "shared", false, "is not an absolute path"),
        (good.clone(), "/workspace/../usr/x", false, "is not an absolute path"),
        (good.clone(), "/tmp", false, "where a sandbox has its own files"),
        (good.clone(), "/usr/x", false, "where a sandbox has its own files"),
    ] {
        let volumes = vec![share(&host, inside, read_only)];
        let made = native.create(&SandboxSpec { volumes, ..spec() }).await.err();
        let Some(BackendError::Create(message)) = made else { panic!("{host:?} at {inside}: {made:?}") };
        assert!(message.contains(why), "{message}");
    }
    assert_eq!(Left::count(&place.0), before);
    native.shutdown().await;
}

#[tokio::test]
async fn kept_data_outlives_its_sandbox_and_belongs_to_the_next() {
    if !root() {
        return;
    }
    let place = Place::new("kept");
    let config = NativeConfig { exclusive: false, spares: 0, ..config(&place.0) };
    let launch = || spawn_launcher_from(&helper()).unwrap();
    let native = Native::start(launch(), config.clone()).await.unwrap().0;
    let spec = SandboxSpec { kept: Some(kept('a')), ..spec() };
    let image = place.0.join("state/data").join(format!("{}.img", kept('a').name));
    let host_uids = || descendants().into_keys().filter_map(uid_of).filter(|uid| *uid >= jail::ids::ROOT_BASE);

    let one = native.create(&spec).await.unwrap();
    let first: BTreeSet<u32> = host_uids().collect();
    let made =
        "cd /data; ls -A; stat -c %u .; echo one > f; mkdir -p d/e; ln -s f l; chmod 600 f; cp /bin/sh s; chmod 4755 s";
    assert_eq!(sh(&*one, made).await, "1000\n");
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(&image).unwrap()) & 0o777, 0o600);
    assert!(matches!(native.create(&spec).await, Err(BackendError::InUse)));
    assert!(matches!(native.discard(&kept('a').name).await, Err(BackendError::InUse)));
    // Another server of the same state directory.
    let second = Native::start(launch(), config.clone()).await.unwrap().0;
    assert!(matches!(second.create(&spec).await, Err(BackendError::InUse)));
    assert!(matches!(second.discard(&kept('a').name).await, Err(BackendError::InUse)));
    // Whoever waits for it has it at once, and neither is in the other's way.
    let (two, gone) = tokio::join!(second.create(&spec), one.destroy());
    gone.unwrap();
    let two = two.unwrap();
    wait_for("the end of the first one's volume", || loops_in(&place.0) == 2);
    assert!(host_uids().all(|uid| !first.contains(&uid)), "{first:?}");
    let seen = "cd /data; stat -c '%u %g %a %n' f d s; cat l; echo two >> f; touch d/e/g; rm s; cat f; ls -A";
    assert_eq!(sh(&*two, seen).await, "1000 1000 600 f\n1000 1000 755 d\n1000 1000 4755 s\none\none\ntwo\nd\nf\nl\n");
    let mount = sh(&*two, "grep ' /data ' /proc/self/mountinfo").await;
    assert!(mount.contains("nosuid,nodev") && mount.lines().count() == 1, "{mount}");
    // As a power failure would leave it: what was synced is in the journal, and the journal is replayed.
    sh(&*two, "echo safe > /data/safe; sync /data/safe").await;
    fs::copy(&image, image.with_file_name(format!("{}.img", kept('c').name))).unwrap();
    let copy = native.create(&SandboxSpec { kept: Some(kept('c')), ..spec.clone() }).await.unwrap();
    assert_eq!(sh(&*copy, "cat /data/safe; rm /data/safe; ls /data").await, "safe\nd\nf\nl\n");
    copy.destroy().await.unwrap();
    native.discard(&kept('c').name).await.unwrap();
    // Full, by bytes and by inodes: an error, no harm to the rest, and not for ever.
    let full = sh(&*two, "dd if=/dev/zero of=/data/big bs=1M 2>&1; echo w > /workspace/w && cat /workspace/w").await;
    assert!(full.contains("No space left") && full.ends_with("w\n"), "{full}");
    two.destroy().await.unwrap();
    // The kept one waits for the next sandbox; a process of the launcher's lets go of the one that was discarded.
    wait_for("the end of the other volumes", || loops_in(&place.0) == 1);
    // For the same server's at once, for another server's when that asks for it.
    let again = second.create(&spec).await.unwrap();
    assert_eq!(sh(&*again, "stat -c '%u %g' /data/f; cat /data/f").await, "1000 1000\none\ntwo\n");
    again.destroy().await.unwrap();
    let three = native.create(&spec).await.unwrap();
    let inodes =
        "rm /data/big; i=0; while true > /data/x$i; do i=$((i+1)); done 2>/dev/null; rm /data/x*; echo $i; cat /data/f";
    let said = sh(&*three, inodes).await;
    let (count, rest) = said.split_once('\n').unwrap();
    assert!((100..=200).contains(&count.parse::<u64>().unwrap()) && rest == "one\ntwo\n", "{said}");
    drop(three);

    // Dropped without a word: soon free all the same.
    let before = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let four = second.create(&spec).await.unwrap();
    let all = native.kept().await.unwrap();
    assert!(all.len() == 1 && all[0].name == kept('a').name && all[0].last_used + 1 >= before, "{all:?}");
    four.destroy().await.unwrap();
    native.discard(&kept('a').name).await.unwrap();
    native.discard(&kept('a').name).await.unwrap();
    assert!(native.kept().await.unwrap().is_empty() && !image.exists());
    let five = native.create(&spec).await.unwrap();
    assert_eq!(sh(&*five, "ls -A /data").await, "");
    native.shutdown().await;
    second.shutdown().await;
    assert_eq!(loops_in(&place.0), 0);
    assert!(image.exists());

    let small = KeptVolume { bytes: 1 << 20, ..kept('b') };
    let odd = KeptVolume { name: "../x".into(), ..kept('b') };
    let native = Native::start(launch(), config).await.unwrap().0;
    for kept in [small, odd] {
        let made = native.create(&SandboxSpec { kept: Some(kept), ..spec.clone() }).await.err();
        assert!(matches!(made, Some(BackendError::Create(_))), "{made:?}");
    }
    native.shutdown().await;
}

/// The workspace of a context: files and packages are there again, with a quota, for one sandbox at a time; mounts and
/// downloads are shown in it, whatever code did to their places.
#[tokio::test]
async fn a_kept_workspace_outlives_its_sandbox_and_is_listed_with_its_owner() {
    if !root() {
        return;
    }
    let place = Place::new("kept-workspace");
    let state = place.0.join("state");
    let dir = owned(&place, "project", 4321);
    fs::write(dir.join("f"), "theirs\n").unwrap();
    fs::set_permissions(dir.join("f"), std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let owner = sandbox::WorkspaceOwner { tenant: "blue".into(), dialect: "sandpool".into(), context: "notes".into() };
    let workspace = Some(sandbox::KeptWorkspace { owner: owner.clone(), packages: "/tmp/.packages".into() });
    let volume = KeptVolume { name: format!("w-{}", "a".repeat(64)), workspace, ..kept('a') };
    let browser = Some(sandbox::BrowserRoom { memory_bytes: 64 << 20, pids: 20 });
    let spec = SandboxSpec {
        kept: Some(volume.clone()),
        volumes: vec![share(&dir, "/workspace/a/project", true)],
        browser,
        ..spec()
    };
    let config = NativeConfig { exclusive: false, spares: 0, ..config(&place.0) };
    let launch = || spawn_launcher_from(&helper()).unwrap();
    let native = Native::start(launch(), config.clone()).await.unwrap().0;
    let stored = || sandbox::workspaces(&state).unwrap();
    assert_eq!(stored(), []);

    let one = native.create(&spec).await.unwrap();
    let made = "cd /workspace; echo one > f; echo p > /tmp/.packages/p; echo gone > /tmp/gone; cat a/project/f; \
                stat -c '%a %u' downloads; touch downloads/x; ls -A";
    assert_eq!(sh(&*one, made).await, "theirs\n770 1000\n.packages\na\ndownloads\nf\n");
    let found = stored();
    assert_eq!((&found[0].owner, found[0].in_use, found.len()), (&owner, true, 1));
    assert!(!sandbox::remove_workspace(&state, &volume.name).unwrap(), "a sandbox has it");
    let other = Native::start(launch(), config.clone()).await.unwrap().0;
    assert!(matches!(other.create(&spec).await.err(), Some(BackendError::InUse)));
    one.destroy().await.unwrap();
    native.shutdown().await;

    // Another server finds it, and its quota holds.
    let two = other.create(&spec).await.unwrap();
    let seen = "cd /workspace; cat f /tmp/.packages/p; ls -A /tmp downloads; \
                dd if=/dev/zero of=big bs=1M 2>&1 | grep -o 'No space left'; rm big";
    assert_eq!(sh(&*two, seen).await, "one\np\n/tmp:\n.downloads\n.packages\n\ndownloads:\nNo space left\n");
    // Code replaces what it can: the next sandbox has other places, but none outside.
    let attack = "cd /workspace; rm -r .packages 2>/dev/null; mv .packages x; ln -s /etc .packages; ls";
    assert!(sh(&*two, attack).await.contains("a\n"));
    two.destroy().await.unwrap();
    let three = other.create(&spec).await.unwrap();
    assert_eq!(
        sh(&*three, "readlink /workspace/.packages; ls -A /tmp/.packages; cat /workspace/a/project/f").await,
        "/etc\ntheirs\n"
    );
    // Something else is in the place of a mount (W68): the mount is left out until code has removed it, and landlock
    // gives nobody the rights of the mount elsewhere.
    let mut last = three;
    let fill = "mv a y; head -c 64M /dev/zero > full; for i in $(seq 1000); do touch $i || break; done";
    for (attack, is_left_out) in [
        ("mv a z; ln -s /tmp a", true),
        ("rm a; ln -s / a", true),
        ("rm a; echo x > a", true),
        ("rm a; mkdir a; echo x > a/project", true),
        ("rm a/project; ln -s / a/project", true),
        ("rm -r a; chmod 555 .", false),
        (fill, true),
    ] {
        sh(&*last, &format!("cd /workspace; {attack}")).await;
        last.destroy().await.unwrap();
        last = other.create(&spec).await.unwrap_or_else(|error| panic!("{attack}: {error}"));
        let missing = last.isolation().missing.join("\n");
        let note = "the mount `/workspace/a/project` is left out";
        let is_there = sh(&*last, "cat /workspace/a/project/f").await == "theirs\n";
        assert_eq!((missing.contains(note), !is_there), (is_left_out, is_left_out), "{attack}: {missing}");
    }
    sh(&*last, "cd /workspace; rm -rf *").await;
    last.destroy().await.unwrap();
    let three = other.create(&spec).await.unwrap();
    assert_eq!(sh(&*three, "cat /workspace/a/project/f").await, "theirs\n");
    three.destroy().await.unwrap();
    assert!(sandbox::remove_workspace(&state, &volume.name).unwrap());
    assert_eq!(stored(), []);
    assert_eq!(fs::read_dir(state.join("data")).unwrap().count(), 0);
    other.shutdown().await;
}
