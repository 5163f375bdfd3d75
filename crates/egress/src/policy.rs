//! What may be reached: tables of the operator's, each of which has to allow a request.

use std::sync::Arc;

/// All of its tables have to allow what is asked for. Several come together from a tool set, a size, a tenant and a call: none of
/// them can widen what another one gives.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policy {
    pub tables: Vec<Arc<Table>>,
}

/// One table, as an operator writes it: `[network.policy.<name>]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Table {
    /// For sentences about denials.
    pub name: String,
    /// Names, `*.name`, addresses, networks, each with `:port` if need be; `public`, `packages`.
    pub allow: Vec<String>,
    /// Wins over `allow`.
    pub deny: Vec<String>,
    /// Where `allow` names none; empty is every one.
    pub ports: Vec<u16>,
    /// Of HTTP where it can be seen; empty is every one.
    pub methods: Vec<String>,
    /// Addresses and networks that are refused otherwise: private, loopback, link-local.
    pub private: Vec<String>,
    pub max_connections: Option<u32>,
    pub max_bytes: Option<u64>,
    pub bytes_per_second: Option<u64>,
    pub connections_per_second: Option<u32>,
}

impl Policy {
    pub fn of(table: Table) -> Self {
        Self { tables: vec![Arc::new(table)] }
    }

    /// What both allow.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        self.tables.extend(other.tables.iter().cloned());
        self
    }
}
