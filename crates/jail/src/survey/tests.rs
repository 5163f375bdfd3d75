use super::*;
use crate::cgroup::Hierarchy;

#[test]
fn root_of_a_small_namespace_has_no_ids_to_give() {
    assert!(maps("         0          0 4294967295\n", ids::ROOT_BASE));
    assert!(!maps("         0       1000          1\n         1     100000      65536\n", ids::ROOT_BASE));
}

/// W47 of the hostile list: the check asks the kernel as a mount does, and does not read the list of loaded file
/// systems.
#[test]
fn w47_a_file_system_is_tried_and_not_looked_up() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    assert_eq!(mountable("sandpool-no-such-fs"), Err(Errno::NODEV));
    let list = fs::read_to_string("/proc/filesystems").unwrap();
    let listed = list.lines().filter_map(|line| line.split('\t').nth(1)).find(|kind| *kind == "tmpfs");
    assert_eq!(mountable(listed.unwrap()), Ok(()));
}

/// W46 of the hostile list: the hint matches the reason, whichever user starts the server.
#[test]
fn w46_the_hint_about_a_cgroup_is_the_one_of_its_reason() {
    let absence = crate::cgroup::Absence::new("others are in it", "start the server alone");
    let layout = Layout { absent: [(Controller::Memory, absence)].into(), ..Layout::default() };
    let fact = cgroup_fact(&layout, Controller::Memory);
    assert_eq!(
        (fact.state, &*fact.why, &*fact.what_to_do),
        (FactState::Off, "others are in it", "start the server alone")
    );
}

/// Covers W44 of the hostile list.
#[test]
fn w44_an_rlimit_is_told_where_no_cgroup_counts_processes() {
    let none = Layout::default();
    let told = |counts, mode| {
        let fact = processes(process_bound(&none, counts, mode));
        (fact.state, fact.why)
    };
    assert_eq!(told(true, Mode::Single), (FactState::On, "an rlimit, which counts in each sandbox for itself".into()));
    assert_eq!(told(false, Mode::Sub).0, FactState::On);
    assert_eq!(told(false, Mode::Root).0, FactState::Off);
}

#[test]
fn a_kernel_without_a_call_is_refused_by_the_calls_name() {
    assert_eq!(sys::missing_calls(), Vec::<&str>::new());
    // Our own seccomp filter hides one of them. The filter applies to one thread; the other tests run without it.
    let hidden = std::thread::spawn(|| {
        crate::process::set_no_new_privs().unwrap();
        crate::seccomp::install(crate::seccomp::compile(crate::seccomp::Profile::Code)).unwrap();
        sys::missing_calls()
    });
    let refusal = too_old("5.2.0", &hidden.join().unwrap()).unwrap();
    assert_eq!(refusal.why, "the kernel `5.2.0` does not have, or a filter around this process hides: clone3 (5.3)");
    assert_eq!(too_old("6.1.0", &[]), None);
}

/// Covers W03 of the hostile list.
#[test]
fn socket_buffers_that_nobody_counts_are_told() {
    let base = crate::test_dir("socket-buffers");
    let state = |version, boot: &str| {
        let hierarchy = Hierarchy { version, controllers: vec![Controller::Memory], base: base.clone() };
        let layout = Layout { hierarchies: vec![hierarchy], ..Layout::default() };
        socket_buffers(&layout, boot).unwrap().state
    };
    assert_eq!(state(Version::V2, "quiet"), FactState::On);
    assert_eq!(state(Version::V2, "quiet cgroup.memory=nokmem,nosocket"), FactState::Off);
    assert_eq!(state(Version::V1, ""), FactState::Off);
    fs::write(base.join(cgroup::SOCKET_LIMIT), "-1").unwrap();
    assert_eq!(state(Version::V1, ""), FactState::On);
    assert_eq!(socket_buffers(&Layout::default(), ""), None);
    fs::remove_dir_all(base).unwrap();
}

#[test]
fn kernels_with_known_holes_are_named() {
    let shown = |release| {
        let fact = kernel(release);
        format!("{release}: {:?} {}", fact.state, fact.why)
    };
    let all = ["6.18.21-fc", "6.18.22", "6.18.29", "6.19.11-rc1", "6.19.12", "7.0.1", "6.1.0-13-amd64", "5.4.0", "x"];
    insta::assert_snapshot!(all.map(shown).join("\n"));
}
