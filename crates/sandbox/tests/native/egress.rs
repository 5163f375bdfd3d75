//! The way out of a sandbox: a socket that listens inside and is accepted outside, or none. Nothing else leads anywhere.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

use super::*;

/// With the program that tries to get out.
pub fn with_reach(egress: bool) -> SandboxSpec {
    let mut spec = SandboxSpec { egress, ..spec() };
    spec.files.push(("/opt/sandpool/reach.py".into(), include_bytes!("reach.py").to_vec()).into());
    spec
}

pub const REACH: &str = "python3 /opt/sandpool/reach.py";

/// How the attempts ended, by name.
async fn attempts(sandbox: &dyn Sandbox) -> BTreeMap<String, String> {
    let said = sh(sandbox, REACH).await;
    let pair = |line: &str| line.split_once(' ').map(|(name, end)| (name.to_owned(), end.to_owned()));
    said.lines().map(|line| pair(line).unwrap_or_else(|| panic!("{said}"))).collect()
}

/// Serves one connection: what it sent, after it was answered.
fn serve(listener: &TcpListener, answer: &str) -> String {
    let (mut stream, _) = listener.accept().unwrap();
    let mut got = [0; 64];
    let read = stream.read(&mut got).unwrap();
    stream.write_all(answer.as_bytes()).unwrap();
    String::from_utf8_lossy(&got[..read]).into_owned()
}

/// The inode of a socket, by which `/proc/<pid>/fd` names it.
fn inode(listener: &TcpListener) -> String {
    let link = fs::read_link(format!("/proc/self/fd/{}", listener.as_fd().as_raw_fd())).unwrap();
    link.to_str().unwrap().to_owned()
}

/// Who has a descriptor that leads to `target`: this process, and all below it.
fn holders(target: &str) -> Vec<u32> {
    let holds = |pid: &u32| {
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        fds.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|link| link.to_str() == Some(target))
    };
    descendants().into_keys().chain([std::process::id()]).filter(holds).collect()
}

#[tokio::test]
async fn what_connects_inside_is_accepted_outside_and_nobody_else_has_the_socket() {
    if !root() {
        return;
    }
    let place = Place::new("egress");
    let native = start(&place.0).await;
    native.start_zygote(&warm::python()).await.unwrap();
    // Once with a network made for it, then with one that waited.
    for round in 0..3 {
        let sandbox = native.create(&with_reach(true)).await.unwrap();
        let listener = sandbox.take_egress_listener().unwrap();
        assert!(sandbox.take_egress_listener().is_none());
        assert_eq!(listener.local_addr().unwrap(), SocketAddr::from(sandbox::PROXY));
        let _kernel = warm::Kernel::new(&*sandbox).await;
        assert_eq!(holders(&inode(&listener)), [std::process::id()], "round {round}");
        let served = std::thread::spawn({
            let listener = listener.try_clone().unwrap();
            move || (serve(&listener, "one\n"), serve(&listener, "two\n"))
        });
        let said = sh(
            &*sandbox,
            "for n in 1 2; do bash -c 'exec 3<>/dev/tcp/127.0.0.1/3128; echo from inside >&3; cat <&3'; done",
        );
        assert_eq!(said.await, "one\ntwo\n");
        assert_eq!(served.join().unwrap(), ("from inside\n".into(), "from inside\n".into()));
        sandbox.destroy().await.unwrap();
    }
    native.shutdown().await;
}

#[tokio::test]
async fn nothing_but_the_way_out_leads_anywhere() {
    if !root() {
        return;
    }
    let place = Place::new("no-egress");
    let native = start(&place.0).await;
    for egress in [true, false] {
        let sandbox = native.create(&with_reach(egress)).await.unwrap();
        let listener = sandbox.take_egress_listener();
        assert_eq!(listener.is_some(), egress);
        let ends = attempts(&*sandbox).await;
        assert_eq!(ends["proxy"], if egress { "DONE" } else { "ECONNREFUSED" });
        assert_eq!(ends["loopback"], "ECONNREFUSED");
        for name in ["tcp", "tcp6", "metadata", "private", "udp", "udp6", "multicast"] {
            assert_eq!(ends[name], "ENETUNREACH", "{name}");
        }
        for name in ["ping", "raw", "packet", "sctp", "vsock"] {
            assert_ne!(ends[name], "DONE", "{name}");
        }
        assert_eq!(sh(&*sandbox, "grep -c : /proc/net/dev; cat /proc/net/route | wc -l").await, "1\n1\n");
        // What listens inside is not to be reached from outside.
        let server =
            "import socket, time; s = socket.create_server((\"\", 8391)); print(1, flush=True); time.sleep(60)";
        let up =
            format!("python3 -c '{server}' > /tmp/up 2>&1 & until [ -s /tmp/up ]; do sleep 0.05; done; cat /tmp/up");
        assert_eq!(sh(&*sandbox, &up).await, "1\n");
        assert!(TcpStream::connect("127.0.0.1:8391").is_err());
        sandbox.destroy().await.unwrap();
    }
    native.shutdown().await;
}

/// The network namespaces that this process, or one below it, is in or has a descriptor of.
fn networks() -> BTreeSet<PathBuf> {
    let of = |pid: u32| {
        let own = fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let open = open.filter_map(|fd| fs::read_link(fd.path()).ok());
        own.into_iter().chain(open.filter(|link| link.to_string_lossy().starts_with("net:[")))
    };
    descendants().into_keys().chain([std::process::id()]).flat_map(of).collect()
}

#[tokio::test]
async fn a_network_ends_with_its_sandbox_and_the_servers_socket() {
    if !root() {
        return;
    }
    let place = Place::new("egress-end");
    let native = start_without_spares(&place.0).await;
    let (before, known) = (Left::count(&place.0), networks());
    // Not taken: goes with the sandbox.
    let sandbox = native.create(&with_reach(true)).await.unwrap();
    sandbox.destroy().await.unwrap();
    drop(sandbox);
    assert_eq!((Left::count(&place.0), networks()), (before, known.clone()));
    // Taken: whoever inside is dead, nobody can connect any more, and the last copy closes the network.
    let sandbox = native.create(&with_reach(true)).await.unwrap();
    let listener = sandbox.take_egress_listener().unwrap();
    sandbox.destroy().await.unwrap();
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    assert_eq!(networks(), known);
    drop(listener);
    native.shutdown().await;
    wait_for("the end of the launcher", || descendants().is_empty());
}
