//! The program of `sandpool run`: its code, language, arguments and standard input.

use std::io::Read;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use engine::WORKSPACE;
use engine::op::{Command, Language};
use rustix::fs::{FileType, fstat};

use super::super::{Failed, output};
use super::files::{MAX_GIVEN, too_large};

/// Name of the file with the standard input, which is removed before the program begins.
pub(super) const STDIN: &str = ".sandpool-stdin";
const BASH: &str = "/bin/bash";
const SHELL: &str = "/bin/sh";
/// Time after which this command tells the user that it waits for its standard input.
const PATIENCE: Duration = Duration::from_secs(2);

/// A language of the command line: a language with a kernel, or the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProgramLanguage {
    Kernel(Language),
    Bash,
}

impl ProgramLanguage {
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        match name.to_ascii_lowercase().as_str() {
            "python" | "py" => Ok(Self::Kernel(Language::Python)),
            "javascript" | "js" => Ok(Self::Kernel(Language::Javascript)),
            "typescript" | "ts" => Ok(Self::Kernel(Language::Typescript)),
            "bash" | "sh" | "shell" => Ok(Self::Bash),
            _ => Err("use `python`, `javascript`, `typescript` or `bash`".into()),
        }
    }

    fn of_file(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "js" | "mjs" | "cjs" => Some(Self::Kernel(Language::Javascript)),
            "ts" | "mts" | "cts" => Some(Self::Kernel(Language::Typescript)),
            "sh" | "bash" => Some(Self::Bash),
            _ => None,
        }
    }

    /// Returns the language of the context in which the program runs.
    pub(super) fn of_context(self) -> Language {
        match self {
            Self::Kernel(language) => language,
            Self::Bash => Language::Python,
        }
    }
}

pub(super) struct Program {
    pub(super) code: String,
    pub(super) language: ProgramLanguage,
    /// Name of the program, then its arguments.
    pub(super) argv: Vec<String>,
    /// Standard input of the program, if it has any.
    pub(super) stdin: Option<Vec<u8>>,
}

impl Program {
    /// Reads the program from the command line, from a file, or from standard input.
    pub(super) fn read(
        code: Option<&str>,
        file: Option<&Path>,
        language: Option<ProgramLanguage>,
        args: &[String],
    ) -> Result<Self, Failed> {
        let file = file.filter(|file| *file != Path::new("-"));
        let (name, code, stdin) = match (code, file) {
            (Some(code), _) => ("-c".into(), code.to_owned(), data()?),
            (None, Some(file)) => {
                let code = std::fs::read_to_string(file)
                    .map_err(|error| Failed(format!("cannot read `{}`: {error}", file.display())))?;
                (file.display().to_string(), code, data()?)
            }
            (None, None) => {
                let mut code = String::new();
                std::io::stdin()
                    .read_to_string(&mut code)
                    .map_err(|error| Failed(format!("cannot read stdin: {error}")))?;
                ("-".into(), code, None)
            }
        };
        let language = language.or_else(|| file.and_then(ProgramLanguage::of_file));
        let language = language.unwrap_or(ProgramLanguage::Kernel(Language::Python));
        let argv = std::iter::once(name).chain(args.iter().cloned()).collect();
        Ok(Self { code, language, argv, stdin })
    }

    /// Returns the cell that gives a kernel the arguments and the standard input, if there are any.
    pub(super) fn preparation(&self) -> Option<String> {
        let ProgramLanguage::Kernel(language) = self.language else { return None };
        if self.argv.len() < 2 && self.stdin.is_none() {
            return None;
        }
        // A list of strings in JSON means the same in both languages.
        let argv = serde_json::json!(self.argv);
        let stdin = serde_json::json!(format!("{WORKSPACE}/{STDIN}"));
        let (argv, mut cell) = match language {
            Language::Python => (format!("__import__('sys').argv[:] = {argv}\n"), PYTHON_STDIN),
            _ => (format!("process.argv.splice(1, process.argv.length, ...{argv});\n"), NODE_STDIN),
        };
        if self.stdin.is_none() {
            cell = "";
        }
        Some(argv + &cell.replace("PATH", &stdin.to_string()))
    }

    /// Returns the command of a program for the shell.
    pub(super) fn command(&self) -> Option<Command> {
        if self.language != ProgramLanguage::Bash {
            return None;
        }
        // Sandboxes see the host's programs.
        let shell = if Path::new(BASH).exists() { BASH } else { SHELL };
        // In the same line, so that errors name the lines of the program.
        let stdin = self.stdin.as_ref().map(|_| format!("exec <{STDIN}; rm {STDIN}; ")).unwrap_or_default();
        let line = [shell.to_owned(), "-c".to_owned(), stdin + &self.code];
        Some(Command::Argv(line.into_iter().chain(self.argv.iter().cloned()).collect()))
    }
}

/// Lets Python, and the programs that it starts, read the file in place of standard input.
const PYTHON_STDIN: &str = "def __stdin(path):
    import io, os, sys
    opened = os.open(path, os.O_RDONLY)
    os.dup2(opened, 0)
    os.close(opened)
    os.unlink(path)
    sys.stdin = io.open(0, encoding='utf-8', closefd=False)
__stdin(PATH)
del __stdin
";

/// Lets JavaScript read the file in place of standard input, as a stream or at once. Node cannot replace a descriptor.
const NODE_STDIN: &str = "{
  const fs = require('node:fs'), opened = fs.openSync(PATH, 'r'), { readFileSync } = fs;
  fs.unlinkSync(PATH);
  let stream;
  Object.defineProperty(process, 'stdin', {
    configurable: true, enumerable: true, get: () => stream ??= fs.createReadStream(null, { fd: opened }),
  });
  fs.readFileSync = (path, ...rest) => readFileSync(path === 0 || path === '/dev/stdin' ? opened : path, ...rest);
  require('node:module').syncBuiltinESMExports();
}
";

/// Reads standard input, unless it is a terminal or another device, or is empty.
fn data() -> Result<Option<Vec<u8>>, Failed> {
    let wrong = |why: &str| Failed(format!("cannot read stdin: {why}"));
    let stdin = std::io::stdin();
    let kind = fstat(stdin.as_fd()).map(|found| FileType::from_raw_mode(found.st_mode));
    if !matches!(kind, Ok(FileType::RegularFile | FileType::Fifo | FileType::Socket)) {
        return Ok(None);
    }
    let (done, waiting) = std::sync::mpsc::channel::<()>();
    let reminder = std::thread::spawn(move || {
        if waiting.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            output::error("sandpool: reading standard input for the program; `</dev/null` gives it none");
        }
    });
    let mut data = Vec::new();
    let read = stdin.lock().take(MAX_GIVEN + 1).read_to_end(&mut data);
    drop(done);
    // The launcher is started later, while this process has a single thread.
    let _ = reminder.join();
    read.map_err(|error| wrong(&error.to_string()))?;
    if data.len() as u64 > MAX_GIVEN {
        return Err(wrong(&too_large()));
    }
    Ok((!data.is_empty()).then_some(data))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(language: &str, args: &[&str], stdin: Option<&str>) -> Program {
        let argv = std::iter::once("-c").chain(args.iter().copied()).map(ToOwned::to_owned).collect();
        let language = ProgramLanguage::parse(language).unwrap();
        Program { code: "x".into(), language, argv, stdin: stdin.map(Into::into) }
    }

    #[test]
    fn a_kernel_is_prepared_only_if_there_is_something_to_give() {
        assert_eq!(program("python", &[], None).preparation(), None);
        assert_eq!(program("bash", &["a"], Some("b")).preparation(), None);
        assert_eq!(
            program("python", &["it's", "\"é\"\n"], None).preparation().unwrap(),
            "__import__('sys').argv[:] = [\"-c\",\"it's\",\"\\\"é\\\"\\n\"]\n"
        );
        let node = program("js", &[], Some("data")).preparation().unwrap();
        assert!(node.starts_with("process.argv.splice(") && node.contains("/workspace/.sandpool-stdin"), "{node}");
    }

    #[test]
    fn a_program_for_the_shell_gets_its_arguments_as_parameters() {
        let Some(Command::Argv(argv)) = program("Bash", &["$x", "b c"], Some("data")).command() else { panic!() };
        assert_eq!(argv[1..], ["-c", "exec <.sandpool-stdin; rm .sandpool-stdin; x", "-c", "$x", "b c"]);
        assert_eq!(program("python", &[], None).command(), None);
    }
}
