//! Adapters that a row's run trained beside frozen weights.

use ir::lora::Lora;

use super::RowReader;
use crate::estimate::workload::Workload;

impl RowReader<'_> {
    /// The workload of a row with its adapters, where it has a rank of them.
    pub(super) fn adapted(&mut self, work: Workload) -> Result<Workload, String> {
        let Some(lora) = self.lora()? else { return Ok(work) };
        work.with_adapters(&lora).map_err(|wrong| format!("`lora_targets`: {}", wrong.headline))
    }

    fn lora(&mut self) -> Result<Option<Lora>, String> {
        let Some(rank) = self.count("lora_rank")?.filter(|rank| *rank > 0) else {
            return Ok(None);
        };
        let stated = self.row.text("lora_targets").trim();
        let targets = match stated {
            "" => "all-linear".to_owned(),
            stated => stated.replace([' ', '+'], ","),
        };
        if stated.is_empty() {
            self.defaults.push(format!("lora_targets={targets}"));
        }
        let base = self.base()?.map(|base| format!(",weights={base}")).unwrap_or_default();
        format!("rank={rank},targets={targets}{base}").parse().map(Some)
    }

    /// The format that frozen weights are stored in; none where it is that of products.
    fn base(&mut self) -> Result<Option<&'static str>, String> {
        let text = self.row.text("base_weights").trim().to_lowercase();
        let has = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
        Ok(if text.is_empty() || has(&["bf16", "fp16", "f16", "bfloat16"]) {
            None
        } else if has(&["nf4-dq", "double"]) {
            Some("nf4-dq")
        } else if has(&["nf4"]) {
            Some("nf4")
        } else if has(&["int8", "8-bit"]) {
            Some("int8")
        } else if has(&["int4", "4-bit", "gptq", "awq"]) {
            // A scale for some hundred weights: 4.13 bits of 4.16.
            self.defaults.push("base_weights=nf4-dq".into());
            Some("nf4-dq")
        } else {
            return Err(format!("`base_weights` is `{text}`, which adapters lie beside nowhere"));
        })
    }
}
