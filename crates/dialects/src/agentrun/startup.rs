//! The log lines of the server's start, in the wording of the document.

use engine::StartupStep;

pub(super) fn lines(step: &StartupStep<'_>) -> Vec<String> {
    match step {
        StartupStep::Begun { id } => vec![
            "AgentRun 初始化开始...".into(),
            format!("创建 Code Interpreter: ci-{id}"),
            "等待 Interpreter 就绪...".into(),
        ],
        StartupStep::Warm => vec!["Interpreter 状态: READY".into()],
        StartupStep::Filling { size } => vec![format!("初始化 Session 池 (大小: {size})...")],
        StartupStep::Created { number, id } => vec![format!("Session-{number} 创建成功: {id}")],
        StartupStep::Checking => vec!["执行健康检查...".into(), "✓ Interpreter 就绪".into()],
        StartupStep::Checked { available, size } => {
            vec![format!("✓ Session 池健康 ({available}/{size} 可用)"), "✓ 所有 Session 验证通过".into()]
        }
        StartupStep::Ready { took, .. } => {
            vec![format!("服务器启动完成，耗时: {:.1} 秒", took.as_secs_f64()), "MCP Server 就绪，等待请求...".into()]
        }
        StartupStep::Failed { error } => vec![format!("启动失败: {error}")],
    }
}
