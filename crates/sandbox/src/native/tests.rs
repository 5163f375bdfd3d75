use super::*;
use jail::cgroup::{Hierarchy, Version};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

#[tokio::test]
async fn a_thousand_dropped_sandboxes_are_all_taken_back_by_a_launcher_that_is_busy() {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let connection = Arc::new(LauncherConnection::open(ours).unwrap());
    for number in 0..1000 {
        connection.post(LauncherCall::Destroy { sandbox: number.to_string() });
    }
    let read = move || {
        let request = |_| wire::receive::<LauncherRequest>(&theirs).unwrap().unwrap().0.call;
        (0..1000).map(request).filter(|call| matches!(call, LauncherCall::Destroy { .. })).count()
    };
    assert_eq!(tokio::task::spawn_blocking(read).await.unwrap(), 1000);
}

/// W19
#[test]
fn w19_nobody_else_can_take_the_directory_of_a_users_servers() {
    let uid = rustix::process::getuid().as_raw();
    let dir = std::env::temp_dir().join(format!("sandpool-runtime-dir-{}", std::process::id()));
    let (home, sessions, state) = (dir.join("home"), dir.join("sessions"), dir.join("state"));
    std::fs::create_dir_all(&home).unwrap();
    std::fs::create_dir_all(&sessions).unwrap();
    let passwd = format!("other:x:4242:4242::/srv:/bin/sh\nme:x:{uid}:{uid}:me:{}:/bin/sh\n", home.display());
    let of = |passwd: &str| runtime_dir_of(uid, &sessions, passwd, &state);
    assert_eq!(of(""), state.join("run"), "neither session nor home");
    assert_eq!(of(&passwd), home.join(".local/state/sandpool/run"));
    assert_eq!(of(&passwd.replace("/home:", "/nowhere:")), state.join("run"), "a home that is not there");
    std::fs::create_dir(sessions.join(uid.to_string())).unwrap();
    assert_eq!(of(&passwd), sessions.join(uid.to_string()).join("sandpool"));
    // A session directory or a home that belongs to somebody else is not trusted.
    let theirs = runtime_dir_of(uid + 1, &dir, &passwd.replace(&format!(":{uid}:"), &format!(":{}:", uid + 1)), &state);
    assert_eq!(theirs, state.join("run"));
    for found in [of(""), of(&passwd), theirs] {
        assert!(found.starts_with(&dir), "a name that everybody can make: {}", found.display());
    }
    std::fs::remove_dir_all(dir).unwrap();
}

fn isolation(controllers: &[Controller], off: &[&str]) -> Isolation {
    let fact = |layer: &str, state| Fact { layer: layer.into(), state, why: "why".into(), what_to_do: "do".into() };
    let layers = [
        "landlock",
        "host uid per sandbox",
        "own inodes",
        "socket buffers",
        "network limits",
        "cgroup memory",
        "cgroup cpu",
        "cgroup pids",
        "open files",
        "processes",
    ];
    let state = |layer| if off.contains(layer) { FactState::Off } else { FactState::On };
    let hierarchy = Hierarchy { version: Version::V2, controllers: controllers.to_vec(), base: "/sys".into() };
    let facts: Vec<Fact> = layers.iter().map(|layer| fact(layer, state(layer))).collect();
    let mut layout = Layout::default();
    layout.hierarchies.push(hierarchy);
    isolation_of(&layout, &facts)
}

#[test]
fn the_level_falls_with_what_is_missing_and_says_what() {
    use Controller::{Cpu, Memory, Pids};
    let level = |controllers: &[Controller], off: &[&str]| {
        let found = isolation(controllers, off);
        (found.level, found.missing)
    };
    assert_eq!(level(&[Memory, Cpu, Pids], &["open files"]), (Level::Full, vec![]));
    assert_eq!(level(&[Memory, Cpu, Pids], &["landlock"]), (Level::Reduced, vec!["landlock: why (do)".into()]));
    assert_eq!(level(&[Memory, Cpu, Pids], &["host uid per sandbox"]).0, Level::Reduced);
    assert_eq!(level(&[Memory, Cpu, Pids], &["socket buffers"]).0, Level::Reduced);
    assert_eq!(level(&[Memory, Cpu, Pids], &["own inodes"]).0, Level::Reduced);
    assert_eq!(level(&[Memory, Cpu, Pids], &["network limits"]).0, Level::Reduced);
    assert_eq!(level(&[Memory, Pids], &["cgroup cpu"]).0, Level::Reduced);
    assert_eq!(level(&[Memory, Cpu], &["cgroup pids"]).0, Level::Basic);
    assert_eq!(level(&[], &["cgroup memory", "cgroup cpu", "cgroup pids"]).1.len(), 3);
    let unheld = |controllers: &[Controller], off: &[&str]| isolation(controllers, off).unheld;
    assert_eq!(unheld(&[Memory, Cpu, Pids], &[]), UnheldLimits::default());
    assert_eq!(unheld(&[Memory], &["processes"]), UnheldLimits { cpu: true, processes: true });
}
