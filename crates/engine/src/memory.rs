//! Accounts for the memory that calls occupy in this process: requests, results and answers. Each tenant has a budget
//! of bytes, and all tenants together have one.
//!
//! A [`Hold`] belongs to one call. Code that stores something for the call adds its size before storing it, and the
//! bytes are given back when the last clone of the hold is dropped. This module does not know what the bytes are.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::guest::lock;
use crate::op::{EngineError, LimitKind, Tenant};

/// Number of bytes of each call that are not counted, so that small calls are admitted however many bytes the large
/// ones occupy. The number of simultaneous calls of a tenant bounds these bytes.
const FREE: usize = 64 << 10;

/// The budgets of all tenants. Clones share them.
#[derive(Clone)]
pub struct Memory(Arc<Budgets>);

struct Budgets {
    per_tenant: usize,
    total: usize,
    held: Mutex<HeldBytes>,
}

#[derive(Default)]
struct HeldBytes {
    all: usize,
    /// Bytes of each tenant. A tenant that holds nothing has no entry.
    tenants: HashMap<Tenant, usize>,
}

/// The budget that is used up, so that no bytes can be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    #[error(
        "your calls hold {} MB of this server's memory, which is their limit; wait for some of them to end, and read their answers",
        .0 >> 20
    )]
    Tenant(usize),
    #[error("the calls of all clients hold as much memory as this server has for them; try again later")]
    All,
}

impl From<Full> for EngineError {
    fn from(full: Full) -> Self {
        match full {
            Full::Tenant(limit) => Self::OverLimit { what: LimitKind::CallMemory, limit: (limit >> 20).to_string() },
            Full::All => Self::NotReady(full.to_string()),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes a tenant, {} in all)", self.0.per_tenant, self.0.total)
    }
}

impl Memory {
    /// Creates budgets of this many bytes.
    pub fn new(per_tenant: usize, total: usize) -> Self {
        Self(Arc::new(Budgets { per_tenant, total, held: Mutex::default() }))
    }

    /// Opens a hold for one call of this tenant.
    pub fn hold(&self, tenant: &Tenant) -> Hold {
        self.open(tenant, FREE)
    }

    /// Opens a hold in which every byte is counted.
    pub fn hold_all_of(&self, tenant: &Tenant) -> Hold {
        self.open(tenant, 0)
    }

    fn open(&self, tenant: &Tenant, free: usize) -> Hold {
        Hold(Arc::new(Account { memory: self.clone(), tenant: tenant.clone(), free, bytes: Mutex::new(0) }))
    }

    /// Returns the number of bytes that all tenants hold now, and the number of those tenants.
    pub fn held(&self) -> (usize, usize) {
        let held = lock(&self.0.held);
        (held.all, held.tenants.len())
    }

    fn change(&self, tenant: &Tenant, from: usize, to: usize) -> Result<(), Full> {
        let mut held = lock(&self.0.held);
        let own = held.tenants.get(tenant).copied().unwrap_or(0) - from + to;
        let all = held.all - from + to;
        if to > from && own > self.0.per_tenant {
            return Err(Full::Tenant(self.0.per_tenant));
        }
        if to > from && all > self.0.total {
            return Err(Full::All);
        }
        held.all = all;
        match own {
            0 => drop(held.tenants.remove(tenant)),
            own => drop(held.tenants.insert(tenant.clone(), own)),
        }
        Ok(())
    }
}

/// Unlimited budgets, for a single client or for the server itself.
impl Default for Memory {
    fn default() -> Self {
        Self::new(usize::MAX, usize::MAX)
    }
}

/// The bytes of one call. Clones are the same hold.
#[derive(Clone)]
pub struct Hold(Arc<Account>);

struct Account {
    memory: Memory,
    tenant: Tenant,
    free: usize,
    bytes: Mutex<usize>,
}

impl Account {
    fn counted(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.free)
    }
}

impl Hold {
    /// Adds bytes. If they are refused, the hold keeps its size.
    pub fn add(&self, more: usize) -> Result<(), Full> {
        self.change(|bytes| bytes.saturating_add(more))
    }

    pub fn give_back(&self, less: usize) {
        // A smaller size is never refused.
        let _ = self.change(|bytes| bytes.saturating_sub(less));
    }

    /// Sets the number of bytes. If it is refused, the hold keeps its size.
    pub fn set(&self, to: usize) -> Result<(), Full> {
        self.change(|_| to)
    }

    fn change(&self, to: impl FnOnce(usize) -> usize) -> Result<(), Full> {
        let Account { memory, tenant, bytes, .. } = &*self.0;
        let mut bytes = lock(bytes);
        let to = to(*bytes);
        let (before, after) = (self.0.counted(*bytes), self.0.counted(to));
        if before != after {
            memory.change(tenant, before, after)?;
        }
        *bytes = to;
        Ok(())
    }

    /// Opens another hold of the same tenant, for work that outlives this call.
    pub(crate) fn sibling(&self) -> Self {
        self.0.memory.hold(&self.0.tenant)
    }

    /// Opens another hold of the same tenant, for data that outlives this call or is released before it ends. Every
    /// byte of it is counted.
    pub fn apart(&self) -> Self {
        self.0.memory.hold_all_of(&self.0.tenant)
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let bytes = *lock(&self.bytes);
        let _ = self.memory.change(&self.tenant, self.counted(bytes), 0);
    }
}

/// A hold that never refuses anything.
impl Default for Hold {
    fn default() -> Self {
        Memory::default().hold(&Tenant::local())
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hold({} bytes)", lock(&self.0.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    #[test]
    fn each_tenant_has_a_budget_and_all_have_one_and_everything_returns() {
        let memory = Memory::new(10 * MB, 15 * MB);
        let (blue, green) = (Tenant("blue".into()), Tenant("green".into()));
        let first = memory.hold_all_of(&blue);
        first.add(6 * MB).unwrap();
        let second = first.apart();
        assert_eq!(second.add(5 * MB), Err(Full::Tenant(10 * MB)));
        second.add(4 * MB).unwrap();
        let other = memory.hold_all_of(&green);
        assert_eq!(other.add(6 * MB), Err(Full::All), "within its own budget, beyond that of all");
        other.add(5 * MB).unwrap();
        first.set(MB).unwrap();
        other.add(5 * MB).unwrap();
        assert_eq!(memory.held(), (15 * MB, 2));
        let clone = first.clone();
        drop(first);
        assert_eq!(memory.held(), (15 * MB, 2), "a clone still holds it");
        drop((clone, second, other));
        assert_eq!(memory.held(), (0, 0));
    }

    #[test]
    fn a_small_call_is_let_in_when_large_ones_hold_everything() {
        let memory = Memory::new(MB, MB);
        let tenant = Tenant::local();
        let large = memory.hold(&tenant);
        large.add(MB + FREE).unwrap();
        let small = memory.hold(&tenant);
        small.add(FREE).unwrap();
        assert_eq!(small.add(1), Err(Full::Tenant(MB)));
        small.give_back(FREE);
        drop(large);
        small.add(2 * FREE).unwrap();
        assert_eq!(memory.held(), (FREE, 1));
    }
}
