//! The operator's commands to a running server, over a unix socket in the state directory.
//!
//! A client sends one line of JSON with the version of the protocol and a command. The server answers with any number
//! of lines about its progress and one line with the result, and closes the connection. Only root and the user of the
//! server can open the socket.

mod client;
mod socket;
pub(crate) mod tenants_file;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use self::client::{AdminError, call};
pub(crate) use self::socket::{AdminServer, AdminSocket};

/// Version of the protocol. A server refuses commands of another version.
const VERSION: u32 = 1;
/// Directory in the state directory that contains the socket. Only root and the user of the server may enter it.
const DIRECTORY: &str = "admin";
const SOCKET: &str = "socket";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdminRequest {
    version: u32,
    command: AdminCommand,
}

/// A command of the operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AdminCommand {
    /// Lists the contexts of all tenants, or describes those with this id.
    Contexts {
        id: Option<String>,
        tenant: Option<String>,
        dialect: Option<String>,
    },
    Stop {
        id: String,
        tenant: Option<String>,
        dialect: Option<String>,
    },
    /// Refuses new work and waits for the work in progress. With `exit`, the server ends afterwards.
    Drain {
        exit: bool,
    },
    /// Accepts work again after a drain.
    Undrain,
    Reload,
    /// Lists the tenants and says where their file is.
    Tenants,
    /// Writes what each tenant used since the last `usage` entries into the journal.
    WriteUsage,
}

/// A line of an answer. The last line is `Done` or `Failed`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AdminReply {
    Progress(String),
    Done(Value),
    Failed(String),
}
