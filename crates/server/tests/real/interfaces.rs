//! W01: programs that list interfaces or look up names, in a sandbox without netlink. `os.networkInterfaces()` is what Vite and Next
//! call before they say where they listen; a refusal would end them.

use serde_json::json;
use testkit::client::Client;
use testkit::host::StateDir;

use crate::support::stdio_of;

const PYTHON: &str = "
import errno, psutil, socket, subprocess
try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
except OSError as e: print(errno.errorcode[e.errno])
found = psutil.net_if_addrs()
print([*found], [a.address for a in found['lo'] if a.family == socket.AF_INET], psutil.net_if_stats()['lo'].isup)
print(socket.if_nameindex(), socket.getaddrinfo('localhost', 80, socket.AF_INET, socket.SOCK_STREAM)[0][4])
# A program that was started with nothing of ours in its environment.
node = subprocess.run(['which', 'node'], capture_output=True, text=True).stdout.strip()
print(subprocess.run(['env', '-i', node, '-p', 'Object.keys(os.networkInterfaces())'], capture_output=True, text=True))
";

const JAVASCRIPT: &str = "
const http = require('http'), dns = require('dns').promises;
const server = http.createServer((_, answer) => answer.end('served')).listen(0, '0.0.0.0');
await new Promise(done => server.on('listening', done));
const addresses = Object.values(require('os').networkInterfaces()).flat().filter(a => a.family === 'IPv4').map(a => a.address);
const said = await (await fetch(`http://${addresses[0]}:${server.address().port}/`)).text();
server.close();
console.log(addresses.join(), said, (await dns.lookup('localhost', { family: 4 })).address);
";

#[test]
fn w01_interfaces_are_listed_and_names_are_looked_up_without_netlink() {
    let state = StateDir::new("interfaces");
    let mut client = Client::start(stdio_of("sandpool", &state.0, ""));
    let context = client.call("create_context", json!({})).field("context");
    let mut run = |language: &str, code: &str| {
        let call = json!({ "code": code, "language": language, "context": context });
        client.call("run_code", call).0.to_string()
    };
    let python = run("python", PYTHON);
    for part in ["EAFNOSUPPORT", "['lo'] ['127.0.0.1'] True", "[(1, 'lo')] ('127.0.0.1', 80)", "[ 'lo' ]"] {
        assert!(python.contains(part), "{part:?} is not in {python}");
    }
    let javascript = run("javascript", JAVASCRIPT);
    assert!(javascript.contains("127.0.0.1 served 127.0.0.1"), "{javascript}");
}
