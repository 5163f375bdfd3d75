//! This module compiles the seccomp policy (`policy::RULES`) to classic BPF and installs the filter.
//!
//! A single filter contains every rule. It finds the syscall number by a binary search over ranges with the same
//! treatment, so that an unconditional syscall costs about eight comparisons; the Linux kernel also caches those
//! answers in a bitmap. A library would test the numbers one after another (1,500 instructions, and most of a
//! millisecond to install, in every start of a kernel).

pub(crate) mod policy;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::OnceLock;

use libc::sock_filter;
use policy::{Action, Clause, RULES, Rule, Test};
use serde::{Deserialize, Serialize};

/// The kind of processes that a filter is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// The guest and everything it starts.
    Code,
    /// The same in a sandbox with writable shared volumes.
    CodeOnHostFiles,
    /// A browser and its driver.
    Browser,
}

/// A compiled filter that can be installed any number of times.
#[derive(Clone)]
pub struct Program(Vec<sock_filter>);

/// Returns the filter of a profile, which is compiled once per process.
pub fn compile(profile: Profile) -> &'static Program {
    static CODE: OnceLock<Program> = OnceLock::new();
    static CODE_ON_HOST_FILES: OnceLock<Program> = OnceLock::new();
    static BROWSER: OnceLock<Program> = OnceLock::new();
    let compiled = match profile {
        Profile::Code => &CODE,
        Profile::CodeOnHostFiles => &CODE_ON_HOST_FILES,
        Profile::Browser => &BROWSER,
    };
    compiled.get_or_init(|| Program(emit_program(profile)))
}

/// Installs the filter for the calling thread and everything it starts from now on. `no_new_privs` has to be set.
/// Allocates nothing, so it may be called between fork and exec.
pub(crate) fn install(program: &Program) -> io::Result<()> {
    let fprog = libc::sock_fprog { len: program.0.len() as u16, filter: program.0.as_ptr().cast_mut() };
    // SAFETY: `fprog` describes `program`'s instructions, which outlive the call; the Linux kernel copies them and does
    // not write to them.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const fprog) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7; // AUDIT_ARCH_AARCH64

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const fn argument(index: u8) -> u32 {
    // The low half comes first: both architectures are little-endian.
    16 + 8 * (index & !policy::HIGH) as u32 + if index & policy::HIGH == 0 { 0 } else { 4 }
}

fn emit_program(profile: Profile) -> Vec<sock_filter> {
    let mut program = vec![load(ARCH), jump(libc::BPF_JEQ, ARCHITECTURE, 1, 0), answer(policy::FOREIGN), load(NUMBER)];
    program.extend(emit_search(&ranges(profile)));
    program
}

/// The first syscall number of a range, and the treatment of all numbers up to the next range.
type Range = (u32, Treatment);

#[derive(Clone, Copy)]
enum Treatment {
    Plain(Action),
    Checked(&'static Rule),
}

impl Profile {
    pub(crate) const ALL: [Self; 3] = [Self::Code, Self::CodeOnHostFiles, Self::Browser];

    /// Returns the rules of this profile. Of two that name a syscall, the later one counts.
    fn rules(self) -> impl Iterator<Item = &'static Rule> {
        let own = if self == Self::Code { &[] } else { policy::HOST_FILES };
        RULES.iter().chain(own)
    }

    /// Returns the treatment of a syscall according to its rule, or `EPERM` where this profile is stricter.
    fn treatment(self, call: policy::SyscallEntry, rule: &'static Rule) -> Treatment {
        let named = || policy::BROWSER.iter().chain(policy::BROWSER_OLD).any(|own| own.number == call.number);
        match self {
            Self::Browser if rule.allows() && !named() => Treatment::Plain(Action::Eperm),
            _ if rule.clauses.is_empty() => Treatment::Plain(rule.otherwise),
            _ => Treatment::Checked(rule),
        }
    }
}

fn ranges(profile: Profile) -> Vec<Range> {
    let treated = |rule: &'static Rule, call: policy::SyscallEntry| (call.number as u32, profile.treatment(call, rule));
    let by_number: BTreeMap<u32, Treatment> =
        profile.rules().flat_map(|rule| rule.calls.iter().map(move |call| treated(rule, *call))).collect();
    let mut ranges: Vec<Range> = Vec::new();
    let mut next = 0;
    for (number, treatment) in by_number {
        if number > next {
            extend(&mut ranges, next, Treatment::Plain(policy::UNNAMED));
        }
        extend(&mut ranges, number, treatment);
        next = number + 1;
    }
    extend(&mut ranges, next, Treatment::Plain(policy::UNNAMED));
    ranges
}

/// Begins a new range unless the previous one has the same treatment.
fn extend(ranges: &mut Vec<Range>, from: u32, treatment: Treatment) {
    match (ranges.last(), treatment) {
        (Some((_, Treatment::Plain(before))), Treatment::Plain(now)) if *before == now => {}
        _ => ranges.push((from, treatment)),
    }
}

fn emit_search(ranges: &[Range]) -> Vec<sock_filter> {
    if let [(_, treatment)] = ranges {
        return match treatment {
            Treatment::Plain(action) => vec![answer(*action)],
            Treatment::Checked(rule) => emit_checks(rule),
        };
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (first, low, high) = (high[0].0, emit_search(low), emit_search(high));
    // Conditional jumps reach at most 255 instructions; longer distances need a second jump.
    let mut code = match u8::try_from(low.len()) {
        Ok(distance) => vec![jump(libc::BPF_JGE, first, distance, 0)],
        Err(_) => vec![jump(libc::BPF_JGE, first, 0, 1), skip(low.len())],
    };
    code.extend(low);
    code.extend(high);
    code
}

fn emit_checks(rule: &Rule) -> Vec<sock_filter> {
    let mut code: Vec<_> = rule.clauses.iter().flat_map(emit_clause).collect();
    code.push(answer(rule.otherwise));
    code
}

/// Emits code that returns the clause's answer if all tests hold, and otherwise continues after its last instruction.
fn emit_clause(clause: &Clause) -> Vec<sock_filter> {
    clause.tests.iter().rev().fold(vec![answer(clause.then)], |rest, test| emit_test(test, rest))
}

/// Emits code that continues with `rest` if the test holds, and skips it otherwise.
fn emit_test(test: &Test, rest: Vec<sock_filter>) -> Vec<sock_filter> {
    let mut comparisons = vec![skip(rest.len())];
    for value in test.values.iter().rev() {
        let to_rest = comparisons.len() as u8;
        if value.low == value.high {
            comparisons.insert(0, jump(libc::BPF_JEQ, value.low, to_rest, 0));
        } else {
            comparisons.insert(0, jump(libc::BPF_JGT, value.high, 0, to_rest));
            comparisons.insert(0, jump(libc::BPF_JGE, value.low, 0, 1));
        }
    }
    let mut code = vec![load(argument(test.argument))];
    if test.mask != u32::MAX {
        code.push(instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, test.mask, 0, 0));
    }
    code.extend(comparisons);
    code.extend(rest);
    code
}

fn load(offset: u32) -> sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0)
}

fn jump(comparison: u32, with: u32, yes: u8, no: u8) -> sock_filter {
    instruction(libc::BPF_JMP | comparison | libc::BPF_K, with, yes, no)
}

fn skip(count: usize) -> sock_filter {
    instruction(libc::BPF_JMP | libc::BPF_JA, count as u32, 0, 0)
}

fn answer(action: Action) -> sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, action.code(), 0, 0)
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

impl Action {
    fn code(self) -> u32 {
        let errno = |e: i32| libc::SECCOMP_RET_ERRNO | e as u32;
        match self {
            Action::Allow => libc::SECCOMP_RET_ALLOW,
            Action::Kill => libc::SECCOMP_RET_KILL_PROCESS,
            Action::Eperm => errno(libc::EPERM),
            Action::Enosys => errno(libc::ENOSYS),
            Action::Einval => errno(libc::EINVAL),
            Action::Enotty => errno(libc::ENOTTY),
            Action::Eafnosupport => errno(libc::EAFNOSUPPORT),
            Action::Eprotonosupport => errno(libc::EPROTONOSUPPORT),
            Action::Enoprotoopt => errno(libc::ENOPROTOOPT),
            Action::Eopnotsupp => errno(libc::EOPNOTSUPP),
            Action::Ignore => errno(0),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Allow => f.write_str("allow"),
            Action::Kill => f.write_str("kill"),
            Action::Ignore => f.write_str("ignore"),
            errno => write!(f, "{}", format!("{errno:?}").to_uppercase()),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# {}", self.why)?;
        for call in self.calls {
            write!(f, "{} ", call.name.trim_start_matches("SYS_"))?;
        }
        if self.clauses.is_empty() {
            return writeln!(f, "-> {}", self.otherwise);
        }
        writeln!(f)?;
        for clause in self.clauses {
            let tests: Vec<String> = clause.tests.iter().map(ToString::to_string).collect();
            writeln!(f, "  {} -> {}", tests.join(", "), clause.then)?;
        }
        writeln!(f, "  otherwise -> {}", self.otherwise)
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<&str> = self.values.iter().map(|v| v.name).collect();
        write!(f, "arg{}", self.argument & !policy::HIGH)?;
        if self.argument & policy::HIGH != 0 {
            write!(f, ".high")?;
        }
        if self.mask != u32::MAX {
            write!(f, " & {:#x}", self.mask)?;
        }
        write!(f, " in [{}]", values.join(", "))
    }
}

#[cfg(test)]
mod tests;
