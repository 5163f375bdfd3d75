//! Sockets: families, protocols, and what can be reached without a network.

use crate::sys::{Result, absent, allowed, at, at_mut, blocked, call, judge, open};
use crate::{Args, Attack, Found};

pub const ATTACKS: &[(&str, Attack)] = &[
    ("sock_vsock", |_| judge(socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0))),
    ("sock_alg", |_| judge(socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0))),
    ("sock_nl_xfrm", |_| judge(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_XFRM))),
    ("sock_nl_netfilter", |_| judge(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER))),
    ("sock_nl_audit", |_| judge(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_AUDIT))),
    ("sock_nl_uevent", |_| judge(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_KOBJECT_UEVENT))),
    ("sock_nl_generic", |_| judge(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_GENERIC))),
    ("sock_nl_route", |_| judge(socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE))),
    ("sock_key", |_| judge(socket(libc::AF_KEY, libc::SOCK_RAW, 2))),
    ("sock_rxrpc", |_| judge(socket(libc::AF_RXRPC, libc::SOCK_DGRAM, libc::AF_INET))),
    ("sock_sweep", sock_sweep),
    ("sock_packet", |_| judge(socket(libc::AF_PACKET, libc::SOCK_RAW, 0x0300))),
    ("sock_raw_icmp", |_| judge(socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP))),
    ("sock_tcp", |_| judge(socket(libc::AF_INET, libc::SOCK_STREAM, 0))),
    ("tcp_ulp", tcp_ulp),
    ("udp_encap", |_| judge(option(libc::SOCK_DGRAM, libc::IPPROTO_UDP, 100, &2i32))),
    ("abstract_socket", abstract_socket),
    ("splice", |_| judge(splice())),
    ("vmsplice", |_| judge(vmsplice())),
    ("sendfile", |_| judge(sendfile())),
    ("zerocopy", |_| judge(option(libc::SOCK_STREAM, libc::SOL_SOCKET, libc::SO_ZEROCOPY, &1i32))),
    ("socket_filter", |_| judge(attach(libc::SO_ATTACH_FILTER))),
    ("reuseport_filter", |_| judge(attach(libc::SO_ATTACH_REUSEPORT_CBPF))),
];

fn socket(family: i32, kind: i32, protocol: i32) -> Result {
    call(libc::SYS_socket, [family, kind | libc::SOCK_CLOEXEC, protocol].map(|n| n as usize))
}

fn sock_sweep(_: &Args) -> Found {
    let mut opened = Vec::new();
    for family in 0..48 {
        for kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_RAW, libc::SOCK_SEQPACKET, libc::SOCK_RDM, 6, 10] {
            for protocol in [0, 1, 2, 3, 4, 6, 9, 12, 15, 16, 17, 21, 33, 58, 108, 115, 132, 136, 255, 256, 262, 0x300]
            {
                let ordinary = match family {
                    libc::AF_UNIX => true,
                    libc::AF_INET | libc::AF_INET6 => kind <= libc::SOCK_DGRAM && [0, 6, 17].contains(&protocol),
                    _ => false,
                };
                if ordinary {
                    continue;
                }
                if let Ok(fd) = socket(family, kind, protocol) {
                    let _ = call(libc::SYS_close, [fd as usize]);
                    opened.push(format!("{family}/{kind}/{protocol}"));
                }
            }
        }
    }
    match opened.len() {
        0 => blocked("none of 48 families, 7 types, 22 protocols"),
        n => allowed(format!("{n} kinds, {}", opened[..n.min(8)].join(" "))),
    }
}

fn option<T>(kind: i32, level: i32, option: i32, value: &T) -> Result {
    let fd = socket(libc::AF_INET, kind, 0)?;
    call(libc::SYS_setsockopt, [fd as usize, level as usize, option as usize, at(value), size_of::<T>()])
}

/// ENOTCONN, and ENOENT for a kernel without TLS, come from the protocol layer: the option itself was let through.
fn tcp_ulp(_: &Args) -> Found {
    crate::sys::reached(
        option(libc::SOCK_STREAM, libc::IPPROTO_TCP, libc::TCP_ULP, b"tls"),
        &[libc::ENOTCONN, libc::ENOENT],
    )
}

fn abstract_socket(args: &Args) -> Found {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixStream};
    if args.canary.is_empty() {
        return absent("no canary was named");
    }
    let Ok(address) = SocketAddr::from_abstract_name(&args.canary) else { return absent("the name is too long") };
    match UnixStream::connect_addr(&address) {
        Ok(_) => allowed("connected"),
        Err(e) => judge(Err(e.raw_os_error().unwrap_or(0))),
    }
}

fn pipe() -> std::result::Result<[i32; 2], i32> {
    let mut fds = [0i32; 2];
    call(libc::SYS_pipe2, [at_mut(&mut fds), 0])?;
    Ok(fds)
}

fn splice() -> Result {
    let file = open("/proc/self/exe", libc::O_RDONLY)?;
    let [_, writer] = pipe()?;
    call(libc::SYS_splice, [file as usize, 0, writer as usize, 0, 1, 0])
}

fn vmsplice() -> Result {
    let [_, writer] = pipe()?;
    let byte = [0u8; 1];
    let vector = [at(&byte), 1];
    call(libc::SYS_vmsplice, [writer as usize, at(&vector), 1, 0])
}

fn sendfile() -> Result {
    let file = open("/proc/self/exe", libc::O_RDONLY)?;
    let mut pair = [0i32; 2];
    call(libc::SYS_socketpair, [libc::AF_UNIX as usize, libc::SOCK_STREAM as usize, 0, at_mut(&mut pair)])?;
    call(libc::SYS_sendfile, [pair[0] as usize, file as usize, 0, 1])
}

/// A filter that lets everything through, on a socket.
fn attach(option: i32) -> Result {
    let fd = socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
    let reuse = 1i32;
    let words = [fd as usize, libc::SOL_SOCKET as usize, libc::SO_REUSEPORT as usize, at(&reuse), 4];
    call(libc::SYS_setsockopt, words)?;
    let pass = libc::sock_filter { code: 6, jt: 0, jf: 0, k: u32::MAX };
    let program = libc::sock_fprog { len: 1, filter: std::ptr::from_ref(&pass).cast_mut() };
    let size = size_of::<libc::sock_fprog>();
    call(libc::SYS_setsockopt, [fd as usize, libc::SOL_SOCKET as usize, option as usize, at(&program), size])
}
