// Reads what the conformance suite wrote: `check.mjs <its package> <revision> <results>`.
//
// Passed means: every scenario that the revision requires of a server was run, each made at least one check, and every check is a
// success. A check that was skipped, or ended in a warning, fails here although the suite lets it pass. Scenarios that the suite
// does not score (extensions, pending ones) are not looked at, except those named below, which pass as well.
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const [suite, revision, results] = process.argv.slice(2);
const { parse } = createRequire(join(suite, "package.json"))("yaml");
const required = parse(readFileSync(join(suite, "requirements", `${revision}.yaml`), "utf8")).server;
const counts = { "2025-11-25": 30, "2026-07-28": 37 };
const besides = {
    "2025-11-25": ["server-session-lifecycle"],
    "2026-07-28": ["json-schema-2020-12", "http-header-validation", "http-custom-header-server-validation"],
};

const faults = [];
if (required.length !== counts[revision]) faults.push(`${required.length} scenarios are required, not ${counts[revision]}`);
const directories = readdirSync(results);
let passed = 0;
for (const scenario of [...required, ...besides[revision]]) {
    // The directory's name is the scenario's between a fixed word and the time.
    const found = directories.filter((name) => name.replace(/-\d{4}-\d\d-\d\dT[\d-]+Z$/, "") === `server-${scenario}`);
    const checks = found.flatMap((name) => JSON.parse(readFileSync(join(results, name, "checks.json"), "utf8")));
    const made = checks.filter((check) => check.status !== "INFO");
    const bad = made.filter((check) => check.status !== "SUCCESS");
    if (made.length === 0) faults.push(`${scenario}: was not run`);
    for (const check of bad) faults.push(`${scenario}: ${check.id}: ${check.status}: ${check.errorMessage ?? ""}`);
    if (made.length > 0 && bad.length === 0 && required.includes(scenario)) passed += 1;
}
for (const fault of faults) console.error(`conformance ${revision}: ${fault}`);
console.error(`conformance ${revision}: ${passed}/${required.length} scenarios passed`);
process.exit(faults.length === 0 ? 0 : 1);
