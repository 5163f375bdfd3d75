//! This module builds a shared library that lists the network interfaces of a sandbox and is loaded into every program
//! in it (`/etc/ld.so.preload`).
//!
//! glibc lists interfaces through netlink, which a sandbox does not have: replies that are not read occupy kernel
//! memory that no cgroup counts. A sandbox has only the loopback interface and never gets another, so the list is a
//! constant. This library's `getifaddrs` and `if_nameindex` return it; Node (`os.networkInterfaces`), psutil, Ruby and
//! others call these two functions.
//!
//! The file is written byte by byte, because it has to load into every program regardless of its C library: an ELF file
//! with four symbols, whose only code is four leaf functions, and without dependencies.

/// Path of the library in a sandbox. Both code and browser may read `/etc`.
pub(crate) const PATH: &str = "/etc/sandpool-interfaces.so";

/// Address and file offset of the data. Code and symbols begin at 0. The data, which the dynamic linker writes to, has
/// separate pages: the second page of the file, at an address that is also valid for pages of 64 KiB.
const DATA_OFFSET: u64 = 0x1000;
const DATA: u64 = 0x11000;
const ALIGN: u64 = 0x10000;

const HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;
const PROGRAM_HEADERS: u64 = 4;

#[cfg(target_arch = "x86_64")]
const MACHINE: (u16, u64) = (62, 8); // EM_X86_64, R_X86_64_RELATIVE
#[cfg(target_arch = "aarch64")]
const MACHINE: (u16, u64) = (183, 1027); // EM_AARCH64, R_AARCH64_RELATIVE

const LOOPBACK: u32 = 1;
const FLAGS: u32 = (libc::IFF_UP | libc::IFF_LOOPBACK | libc::IFF_RUNNING) as u32;
const ARPHRD_LOOPBACK: u16 = 772;

/// Returns the file. Without `ipv6` (a Linux kernel that lacks it) the loopback has only its IPv4 address.
pub(crate) fn library(ipv6: bool) -> Vec<u8> {
    let data = Data::new(ipv6);
    let names = ["getifaddrs", "freeifaddrs", "if_nameindex", "if_freenameindex"];
    let mut strings = vec![0];
    let string_at: Vec<u32> = names.iter().map(|name| push_name(&mut strings, name)).collect();

    let symbols_at = HEADER + PROGRAM_HEADERS * PROGRAM_HEADER;
    let hash_at = symbols_at + 24 * (names.len() as u64 + 1);
    // A single bucket whose chain contains all symbols.
    let hash: Vec<u8> = [1, names.len() as u32 + 1, 1, 0, 2, 3, 4, 0].iter().flat_map(|n| n.to_le_bytes()).collect();
    let strings_at = hash_at + hash.len() as u64;
    let relocations_at = (strings_at + strings.len() as u64).next_multiple_of(8);
    let code_at = (relocations_at + 24 * data.pointers.len() as u64).next_multiple_of(16);
    let (code, functions) = code(code_at, data.addresses, data.index);
    let end = code_at + code.len() as u64;

    let dynamic: Vec<u8> = [
        (4, hash_at),
        (5, strings_at),
        (10, strings.len() as u64),
        (6, symbols_at),
        (11, 24),
        (7, relocations_at),
        (8, 24 * data.pointers.len() as u64),
        (9, 24),
        (0, 0),
    ]
    .iter()
    .flat_map(|(tag, value): &(u64, u64)| [tag.to_le_bytes(), value.to_le_bytes()].concat())
    .collect();
    assert!(dynamic.len() as u64 == DYNAMIC, "the data begins behind the dynamic section");

    let mut file = header();
    let writable = DYNAMIC + data.bytes.len() as u64;
    file.extend(program_header(1, 5, (0, 0), end, ALIGN)); // loaded, readable and executable
    file.extend(program_header(1, 6, (DATA_OFFSET, DATA), writable, ALIGN)); // loaded, readable and writable
    file.extend(program_header(2, 6, (DATA_OFFSET, DATA), DYNAMIC, 8)); // the dynamic section
    file.extend(program_header(0x6474_e551, 6, (0, 0), 0, 16)); // PT_GNU_STACK: a stack that is not executable
    file.extend([0; 24]);
    for (name, (at, size)) in string_at.iter().zip(functions) {
        file.extend(name.to_le_bytes());
        file.extend([0x12, 0, 1, 0]); // a global function, visible, in some section
        file.extend([at, size].map(u64::to_le_bytes).concat());
    }
    file.extend(hash);
    file.extend(strings);
    file.resize(relocations_at as usize, 0);
    for (at, to) in &data.pointers {
        file.extend([*at, MACHINE.1, *to].map(u64::to_le_bytes).concat());
    }
    file.resize(code_at as usize, 0);
    file.extend(code);
    file.resize(DATA_OFFSET as usize, 0);
    file.extend(dynamic);
    file.extend(data.bytes);
    file
}

/// Size of the dynamic section, which lies at the beginning of the data.
const DYNAMIC: u64 = 9 * 16;

fn push_name(strings: &mut Vec<u8>, name: &str) -> u32 {
    let at = strings.len() as u32;
    strings.extend(name.as_bytes());
    strings.push(0);
    at
}

fn header() -> Vec<u8> {
    let mut header = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    header.extend([3, MACHINE.0].map(u16::to_le_bytes).concat()); // a shared object
    header.extend(1u32.to_le_bytes());
    header.extend([0, HEADER, 0].map(u64::to_le_bytes).concat());
    header.extend(0u32.to_le_bytes());
    header.extend(
        [HEADER as u16, PROGRAM_HEADER as u16, PROGRAM_HEADERS as u16, 64, 0, 0].map(u16::to_le_bytes).concat(),
    );
    header
}

fn program_header(kind: u32, flags: u32, (offset, address): (u64, u64), size: u64, align: u64) -> Vec<u8> {
    let mut header = [kind, flags].map(u32::to_le_bytes).concat();
    header.extend([offset, address, address, size, size, align].map(u64::to_le_bytes).concat());
    header
}

/// The list and the positions of the addresses in it.
struct Data {
    bytes: Vec<u8>,
    /// For each pointer, its own address and the address that it holds.
    pointers: Vec<(u64, u64)>,
    /// Address of the first `struct ifaddrs`.
    addresses: u64,
    /// Address of the first `struct if_nameindex`.
    index: u64,
}

impl Data {
    fn new(ipv6: bool) -> Self {
        let mut data = Self { bytes: Vec::new(), pointers: Vec::new(), addresses: 0, index: 0 };
        let name = data.put(b"lo\0");
        let statistics = data.put(&[0; 96]); // struct rtnl_link_stats
        let link = data.put(&link_address());
        let mut entries = vec![(link, None, Some(statistics))];
        let (address, mask) = (data.put(&ipv4([127, 0, 0, 1])), data.put(&ipv4([255, 0, 0, 0])));
        entries.push((address, Some(mask), None));
        if ipv6 {
            let (address, mask) = (data.put(&ipv6_address(0, 1)), data.put(&ipv6_address(0xff, 0xff)));
            entries.push((address, Some(mask), None));
        }
        // struct ifaddrs: next, name, flags, address, mask, destination, statistics.
        data.addresses = data.next();
        let last = entries.len() - 1;
        for (number, (address, mask, statistics)) in entries.into_iter().enumerate() {
            let next = (number < last).then(|| data.next() + 56);
            data.pointer(next);
            data.pointer(Some(name));
            data.bytes.extend(u64::from(FLAGS).to_le_bytes());
            [Some(address), mask, None, statistics].into_iter().for_each(|to| data.pointer(to));
        }
        // struct if_nameindex: number and name. The last entry has neither.
        data.index = data.next();
        data.bytes.extend(u64::from(LOOPBACK).to_le_bytes());
        data.pointer(Some(name));
        data.bytes.extend([0; 16]);
        data
    }

    /// Returns the address of the next item.
    fn next(&mut self) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        DATA + DYNAMIC + self.bytes.len() as u64
    }

    fn put(&mut self, bytes: &[u8]) -> u64 {
        let at = self.next();
        self.bytes.extend(bytes);
        at
    }

    fn pointer(&mut self, to: Option<u64>) {
        let at = self.put(&[0; 8]);
        self.pointers.extend(to.map(|to| (at, to)));
    }
}

/// Encodes a `struct sockaddr_ll` with an address of six zeros.
fn link_address() -> Vec<u8> {
    let mut address = [libc::AF_PACKET as u16, 0].map(u16::to_ne_bytes).concat();
    address.extend(LOOPBACK.to_ne_bytes());
    address.extend(ARPHRD_LOOPBACK.to_ne_bytes());
    address.extend([0, 6]);
    address.extend([0; 8]);
    address
}

/// Encodes a `struct sockaddr_in`.
fn ipv4(address: [u8; 4]) -> Vec<u8> {
    [&(libc::AF_INET as u16).to_ne_bytes()[..], &[0; 2], &address, &[0; 8]].concat()
}

/// Encodes a `struct sockaddr_in6`: fifteen bytes `rest`, then `last`.
fn ipv6_address(rest: u8, last: u8) -> Vec<u8> {
    [&(libc::AF_INET6 as u16).to_ne_bytes()[..], &[0; 6], &[rest; 15], &[last], &[0; 4]].concat()
}

/// Returns the code of the functions in the order of their names, for the address `at`, and the address and size of
/// each. The first and the third function return the lists; the others do nothing.
#[cfg(target_arch = "x86_64")]
fn code(at: u64, addresses: u64, index: u64) -> (Vec<u8>, [(u64, u64); 4]) {
    // `lea rax, [rip + …]` has seven bytes, and its distance is relative to its end.
    let lea = |from: u64, to: u64| [&[0x48, 0x8d, 0x05][..], &((to - from - 7) as u32).to_le_bytes()].concat();
    let mut code = lea(at, addresses);
    code.extend([0x48, 0x89, 0x07]); // mov [rdi], rax
    code.extend([0x31, 0xc0, 0xc3]); // xor eax, eax; ret
    code.push(0xc3);
    code.extend(lea(at + 14, index));
    code.extend([0xc3, 0xc3]);
    (code, [(at, 13), (at + 13, 1), (at + 14, 8), (at + 22, 1)])
}

#[cfg(target_arch = "aarch64")]
fn code(at: u64, addresses: u64, index: u64) -> (Vec<u8>, [(u64, u64); 4]) {
    const RET: u32 = 0xd65f_03c0;
    // `adr xN, …` encodes the two lowest bits of the distance separately.
    let adr = |register: u32, from: u64, to: u64| {
        let distance = (to - from) as u32;
        0x1000_0000 | (distance & 3) << 29 | (distance >> 2) << 5 | register
    };
    // adr x1; str x1, [x0]; mov w0, 0; ret
    let code = [adr(1, at, addresses), 0xf900_0001, 0x5280_0000, RET, RET, adr(0, at + 20, index), RET, RET];
    let code = code.iter().flat_map(|word| word.to_le_bytes()).collect();
    (code, [(at, 16), (at + 16, 4), (at + 20, 8), (at + 28, 4)])
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, CString};

    use super::*;

    /// The library, loaded as in a program that was started with it.
    struct Loaded(*mut libc::c_void);

    impl Loaded {
        fn new(ipv6: bool) -> Self {
            let path = std::env::temp_dir().join(format!("interfaces-{}-{ipv6}.so", std::process::id()));
            std::fs::write(&path, library(ipv6)).unwrap();
            let name = CString::new(path.to_str().unwrap()).unwrap();
            // SAFETY: the name ends with a zero; the library has no initialisers.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
            std::fs::remove_file(path).unwrap();
            assert!(!handle.is_null(), "the dynamic linker does not take it");
            Self(handle)
        }

        fn symbol(&self, name: &CStr) -> *mut libc::c_void {
            // SAFETY: the handle is open and the name ends with a zero.
            let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
            assert!(!symbol.is_null(), "{name:?}");
            symbol
        }

        fn addresses(&self) -> Vec<String> {
            let get = self.symbol(c"getifaddrs");
            // SAFETY: the symbol has the signature of its name; the list it returns is static.
            unsafe {
                let get: extern "C" fn(*mut *mut libc::ifaddrs) -> i32 = std::mem::transmute(get);
                let mut next = std::ptr::null_mut();
                assert_eq!(get(&raw mut next), 0);
                let mut lines = Vec::new();
                while let Some(entry) = next.as_ref() {
                    let bytes = |at: *mut libc::sockaddr| {
                        let size = match i32::from((*at).sa_family) {
                            libc::AF_INET => 16,
                            libc::AF_INET6 => 28,
                            _ => 20,
                        };
                        let bytes = std::slice::from_raw_parts(at.cast::<u8>(), size);
                        bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
                    };
                    let mask = if entry.ifa_netmask.is_null() { "-".to_owned() } else { bytes(entry.ifa_netmask) };
                    let name = CStr::from_ptr(entry.ifa_name).to_str().unwrap();
                    lines.push(format!("{name} {:#x} {} {mask}", entry.ifa_flags, bytes(entry.ifa_addr)));
                    next = entry.ifa_next;
                }
                lines
            }
        }
    }

    #[test]
    fn the_dynamic_linker_takes_it_and_the_list_is_the_loopback() {
        let loaded = Loaded::new(true);
        insta::assert_snapshot!(loaded.addresses().join("\n"), @"
        lo 0x49 1100000001000000040300060000000000000000 -
        lo 0x49 020000007f0000010000000000000000 02000000ff0000000000000000000000
        lo 0x49 0a000000000000000000000000000000000000000000000100000000 0a00000000000000ffffffffffffffffffffffffffffffff00000000
        ");
        assert_eq!(Loaded::new(false).addresses(), loaded.addresses()[..2]);
        // SAFETY: the symbols have the signatures of their names; what they return is static.
        unsafe {
            let index: extern "C" fn() -> *const libc::if_nameindex =
                std::mem::transmute(loaded.symbol(c"if_nameindex"));
            let list = std::slice::from_raw_parts(index(), 2);
            assert_eq!((list[0].if_index, CStr::from_ptr(list[0].if_name)), (LOOPBACK, c"lo"));
            assert!(list[1].if_index == 0 && list[1].if_name.is_null());
            for free in [c"freeifaddrs", c"if_freenameindex"] {
                let free: extern "C" fn(*const libc::c_void) = std::mem::transmute(loaded.symbol(free));
                free(index().cast());
            }
        }
    }
}
