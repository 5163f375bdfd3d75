//! Servers of ordinary users: what they have, what they lack, and that they do not disturb each other.

use super::*;

#[test]
fn an_ordinary_user_has_sandboxes_with_and_without_subordinate_ids() {
    if !root() {
        return;
    }
    let place = place_for_all("user");
    let probe = "id -u; grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status; cat /proc/1/environ 2>&1; touch /usr/x 2>&1; \
                 dd if=/dev/zero of=/workspace/big bs=1M 2>&1 | grep -o 'No space left'; rm /workspace/big; \
                 i=0; while [ $i -lt 200 ]; do sleep 9 & i=$((i+1)); done 2>&1 | grep -o -m1 'annot fork'; kill $(pidof sleep); true";
    for mode in modes() {
        let state = place.0.join(mode);
        let Some(output) = as_user(&place, &["serve", mode, state.to_str().unwrap(), probe]) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let shown =
            said.replace("level Basic", "level -").replace("level Full", "level -").replace("level Reduced", "level -");
        assert_eq!(
            shown,
            format!(
                "mode {mode} level -\n1000\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n\
                 cat: /proc/1/environ: Permission denied\ntouch: cannot touch '/usr/x': Read-only file system\n\
                 No space left\nannot fork\n"
            )
        );
        assert!(fs::read_dir(state.join("instances")).unwrap().next().is_none());
    }
    wait_for("the end of the launcher", || descendants().is_empty());
}

#[test]
fn an_ordinary_user_keeps_data_and_shares_directories_too() {
    if !root() {
        return;
    }
    let place = place_for_all("user-kept");
    for mode in modes() {
        let state = place.0.join(mode);
        let words = ["keep", mode, state.to_str().unwrap()];
        let lines = [
            "cd /data; ls -A; stat -c '%u %a' .; echo one > f; chmod 600 f; mkdir d",
            "cd /data; stat -c '%u %a %n' f d; cat f; dd if=/dev/zero of=big bs=1M 2>&1 | grep -o 'No space left'; \
             echo w > /workspace/w && cat /workspace/w",
            "cd /data; rm big; echo two >> f; cat f; rmdir d; ls -A; grep -c ' /data .*nosuid,nodev' /proc/self/mountinfo",
        ];
        let Some(output) = as_user(&place, &[&words[..], &lines[..]].concat()) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(said, "1000 755\n1000 600 f\n1000 755 d\none\nNo space left\nw\none\ntwo\nf\n1\n", "{mode}");
        assert!(output.status.success());
        assert!(fs::read_dir(state.join("instances")).unwrap().next().is_none());

        let shared = place.0.join(format!("shared-{mode}"));
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        fs::write(shared.join("theirs"), "theirs\n").unwrap();
        let line = "cat /rw/theirs; echo x > /rw/ours; stat -c %u /ro/ours; touch /ro/x 2>&1 | grep -o 'Read-only'; \
                    echo x 2>/dev/null > /rw/theirs";
        let words = ["share", mode, state.to_str().unwrap(), shared.to_str().unwrap(), line];
        let Some(output) = as_user(&place, &words) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.starts_with("theirs\n1000\nRead-only\n"), "{mode}: {said}");
        assert!(said.ends_with(if mode == "sub" { "1 notes\n" } else { "0 notes\n" }), "{mode}: {said}");
        assert_eq!(fs::read_to_string(shared.join("theirs")).unwrap(), "theirs\n");
    }
    wait_for("the end of the launcher", || descendants().is_empty());
}

/// Files that code makes in a directory of the user are the user's, and a directory that only the user may read can be
/// read inside. With subordinate ids this takes the user's own uid, and the sandbox says so.
#[test]
#[allow(clippy::disallowed_methods, reason = "asks for the user's number")]
fn what_code_makes_in_a_directory_of_an_ordinary_user_is_that_users() {
    if !root() {
        return;
    }
    let place = place_for_all("user-mounts");
    for mode in modes() {
        let (state, dir) = (place.0.join(mode), place.0.join(format!("own-{mode}")));
        fs::create_dir(&dir).unwrap();
        let words = ["share", mode, state.to_str().unwrap(), dir.to_str().unwrap()];
        let _proc = Mounted::proc(&dir.join("proc"));
        // The user exists once a server was started.
        let Some(_) = as_user(&place, &[&words[..], &["true"]].concat()) else { return };
        let number = Command::new("id").args(["-u", USER]).output().unwrap().stdout;
        let user: u32 = String::from_utf8(number).unwrap().trim().parse().unwrap();
        for path in [&dir, &dir.join("secret")] {
            if *path != dir {
                fs::write(path, "secret\n").unwrap();
            }
            std::os::unix::fs::chown(path, Some(user), Some(user)).unwrap();
            fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        }
        let line = "cat /ro/secret; id -u; echo more >> /rw/secret; mkdir /rw/d; echo x > /rw/d/f; cp /bin/sh /rw/sh; \
                    (chmod 4755 /rw/sh || chmod 2755 /rw/sh) 2>/dev/null || chmod 755 /rw/sh; ls -A /rw/proc /ro/proc; touch /ro/x 2>&1 | grep -o Read-only; grep -c ' /r[ow] .*nosuid,nodev' /proc/self/mountinfo";
        let Some(output) = as_user(&place, &[&words[..], &[line]].concat()) else { return };
        // On a busy machine a spare may not be ready before the end.
        let said = String::from_utf8_lossy(&output.stderr);
        let said: String = said.split_inclusive('\n').filter(|line| !line.starts_with("launcher: no spare")).collect();
        let notes = if mode == "sub" { 1 } else { 0 };
        assert_eq!(said, format!("secret\n1000\n/ro/proc:\n\n/rw/proc:\nRead-only\n2\n{notes} notes\n"), "{mode}");
        assert_eq!(fs::read_to_string(dir.join("secret")).unwrap(), "secret\nmore\n");
        assert_eq!([owner(&dir.join("d")), owner(&dir.join("d/f")), owner(&dir.join("sh"))], [user; 3], "{mode}");
        assert_eq!(
            std::os::unix::fs::MetadataExt::mode(&fs::metadata(dir.join("sh")).unwrap()) & 0o7777,
            0o755,
            "{mode}"
        );
    }
    wait_for("the end of the launcher", || descendants().is_empty());
}

/// W49: kept volumes in memory outlive the sandboxes whose memory limits held while they were filled.
#[test]
#[allow(clippy::disallowed_methods, reason = "the server under test")]
fn w49_volumes_in_memory_leave_no_more_than_their_budget() {
    if !root() {
        return;
    }
    let place = Place::new("hoard");
    fs::set_permissions(&place.0, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    for mode in ["sub", "single", "root"] {
        if mode == "sub" && !Path::new("/usr/bin/newuidmap").exists() {
            skip("newuidmap is not installed");
            continue;
        }
        let state = place.0.join(mode);
        let words = ["hoard", mode, state.to_str().unwrap()];
        let without_loop_devices = ["-m", "sh", "-c", "mount --bind /dev/null /dev/loop-control; exec \"$@\"", "sh"];
        let output = match mode {
            "root" => Command::new("unshare").args(without_loop_devices).arg(helper()).args(words).output().unwrap(),
            _ => match as_user(&place, &words) {
                Some(output) => output,
                None => return,
            },
        };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{mode}: {said}");
        let sizes: Vec<u64> = said.lines().filter_map(|line| line.parse().ok()).collect();
        // Half of the tenant's 64 MB, with the files' own memory.
        assert!(sizes.len() > 2 && sizes[0] > 10 << 20, "{mode}: {said}");
        let sum: u64 = sizes.iter().sum();
        assert!((20 << 20..=32 << 20).contains(&sum), "{mode}: {said}");
        // What is there can be read and deleted, which makes room, and another tenant has its own.
        assert!(said.contains("full\nremoved\nanother\nanother\n"), "{mode}: {said}");
        // The tenant's cgroup, if there is one, keeps the charge as long as there are volumes.
        let charged: Vec<i64> = said.lines().filter_map(|line| line.strip_prefix("charged ")?.parse().ok()).collect();
        let [filled, discarded] = charged[..] else { panic!("{mode}: {said}") };
        assert!(filled >= (sum >> 20) as i64 || (filled == -1 && mode != "root"), "{mode}: {said}");
        assert_eq!(discarded, -1, "{mode}: {said}");
        assert!(fs::read_dir(state.join("instances")).unwrap().next().is_none());
    }
    wait_for("the end of the launcher", || descendants().is_empty());
}

#[tokio::test]
async fn two_users_side_by_side_do_not_disturb_each_other() {
    if !root() {
        return;
    }
    let (ours, theirs) = (Place::new("ours"), place_for_all("theirs"));
    let native = start(&ours.0).await;
    let sandbox = native.create(&spec()).await.unwrap();
    assert_eq!(sh(&*sandbox, "echo ours > /workspace/f; cat /workspace/f").await, "ours\n");
    // The other user's server starts, sweeps, works and ends; it can neither see nor reach what is ours.
    let state = theirs.0.join("state");
    let words = ["serve", "single", state.to_str().unwrap(), "ls /workspace; kill -9 -1; echo theirs"];
    let Some(output) = as_user(&theirs, &words) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(sh(&*sandbox, "cat /workspace/f").await, "ours\n");
    let mode =
        |path: &Path| std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).unwrap().permissions()) & 0o777;
    assert_eq!(mode(&ours.0.join("state/instances")), 0o700, "another user could connect to a guest");
    native.shutdown().await;
}

#[test]
fn a_level_below_the_floor_is_refused_and_leaves_nothing() {
    if !root() {
        return;
    }
    let place = place_for_all("floor");
    let state = place.0.join("state");
    // Alone, a user has no host uid to give to a sandbox: never more than the middle level.
    let Some(output) = as_user(&place, &["floor", "single", state.to_str().unwrap()]) else { return };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("is below the configured floor `Full`: "), "{said}");
    assert!(said.contains("host uid per sandbox: single: sandboxes are your own user on the host"), "{said}");
    wait_for("the end of the launcher", || descendants().is_empty());
    wait_for("an empty state directory", || fs::read_dir(state.join("instances")).unwrap().next().is_none());
}

/// W34: a server keeps its memory to itself, and works all the same. Its launcher lives in a user namespace that belongs to the user,
/// who may do everything there; it has no secrets.
#[test]
fn w34_a_users_other_processes_cannot_look_into_its_server() {
    if !root() {
        return;
    }
    let place = place_for_all("private");
    for mode in modes() {
        let state = place.0.join(mode);
        let Some(output) = as_user(&place, &["private", mode, state.to_str().unwrap()]) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(said, format!("mode {mode}\nPermission denied\n1000\n"));
        assert!(output.status.success());
    }
    wait_for("the end of the launcher", || descendants().is_empty());
}

/// Without a cgroup, the launcher measures: in whatever way a program uses memory, its sandbox is ended, and no other.
/// A program that stays below the limit goes on, however much its processes have together if shared pages count twice.
#[test]
fn a_sandbox_that_no_cgroup_limits_is_ended_when_it_exceeds_its_memory() {
    if !root() {
        return;
    }
    const WAYS: [&str; 8] = ["fast", "slow", "forks", "copied", "files", "shared", "memfd", "segments"];
    let place = place_for_all("user-memory");
    let program = place.0.join("swell.py");
    fs::write(&program, include_str!("swell.py")).unwrap();
    for mode in modes() {
        let state = place.0.join(mode);
        let words = ["swell", mode, state.to_str().unwrap(), program.to_str().unwrap()];
        let Some(output) = as_user(&place, &[&words[..], &WAYS[..], &["modest"]].concat()) else { return };
        let said = String::from_utf8_lossy(&output.stderr);
        let (log, said): (Vec<&str>, Vec<&str>) = said.lines().partition(|line| line.starts_with("launcher: "));
        let mut expected = vec!["level Basic unheld UnheldLimits { cpu: true, processes: false }".to_owned()];
        expected.extend(WAYS.iter().flat_map(|way| [format!("{way}: ended at Some(256)"), "neighbour".into()]));
        expected.extend(["modest 140", "modest: ended at None", "neighbour"].map(str::to_owned));
        assert_eq!(said, expected, "{mode}: {log:#?}");
        let ended = log.iter().filter(|line| line.contains(" is ended: it uses ")).count();
        assert_eq!(ended, WAYS.len(), "{mode}: {log:#?}");
        assert!(output.status.success());
    }
    wait_for("the end of the launcher", || descendants().is_empty());
}
