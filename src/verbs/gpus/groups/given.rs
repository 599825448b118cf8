//! Layouts of groups as users write them, and as `plan` prints them: `h100: tp=8; a100: tp=4 dp=2`.

use ir::Diagnostic;
use ir::import::nearest;
use planner::configuration::Configuration;
use planner::search::groups::{self, Grouped};

use super::Mixed;
use crate::failure::{Failure, usage};

impl Mixed {
    /// What layouts of the groups cost, written one after another with `;` between them: each with
    /// its group's name and a colon before it, as `plan` prints them, where groups that are not
    /// named do nothing; or one for each group, `-` for one that does nothing. Where all name the
    /// layers of their stages, and these are the model's, they are one pipeline in the order of the
    /// text. `change` may change each.
    ///
    /// # Errors
    /// `E5001` for texts that are of no group; those of [`groups::score`] and
    /// [`groups::score_line`].
    pub fn score(
        &self,
        (flag, text): (&str, &str),
        change: &dyn Fn(Configuration) -> Configuration,
        question: &groups::GroupRequest<'_>,
    ) -> Result<Grouped, Failure> {
        let mut layouts = Vec::new();
        for (group, text) in self.texts(flag, text)? {
            let layout: Configuration = text.parse().map_err(Failure::Input)?;
            layouts.push((group, change(layout)));
        }
        let depth = u64::from(self.work.depth());
        let layers = layouts.iter().flat_map(|(_, c)| &c.stage_layers);
        let is_cut = layouts.iter().all(|(_, c)| !c.stage_layers.is_empty());
        if layouts.len() > 1 && is_cut && layers.map(|n| u64::from(*n)).sum::<u64>() == depth {
            return Ok(Grouped::Stages(groups::score_line(question, &layouts)?));
        }
        let mut shares = vec![None; self.cluster.groups.len()];
        for (group, layout) in layouts {
            shares[group] = Some(layout);
        }
        Ok(Grouped::Shares(groups::score(question, &shares)?))
    }

    /// The texts of layouts, each with its group.
    fn texts<'a>(&self, flag: &str, text: &'a str) -> Result<Vec<(usize, &'a str)>, Diagnostic> {
        // A colon in a layout, as in `recompute=layers:2`, has no space after it.
        let named = |text: &'a str| text.split_once(':').filter(|(_, rest)| rest.starts_with(' '));
        let texts: Vec<&str> = text.split(';').map(str::trim).collect();
        let groups = &self.cluster.groups;
        let help = "write one for each group with `;` between them, `-` for none; or those of some \
                    groups, each after its name: `NAME: tp=8; NAME: tp=4`";
        if texts.iter().all(|text| named(text).is_none()) {
            if texts.len() != groups.len() {
                let (count, there) = (texts.len(), groups.len());
                let headline = format!("{count} layouts, and the cluster has {there} groups");
                return Err(usage(flag, headline).help(help));
            }
            return Ok(texts.into_iter().enumerate().filter(|(_, text)| *text != "-").collect());
        }
        let mut found: Vec<(usize, &str)> = Vec::new();
        for text in texts {
            let Some((name, layout)) = named(text) else {
                return Err(usage(flag, format!("`{text}` is of no group")).help(help));
            };
            let is_free = |at: &usize| found.iter().all(|(other, _)| other != at);
            let of_name = |at: &usize| groups[*at].name == name.trim();
            let Some(group) = (0..groups.len()).filter(of_name).find(is_free) else {
                let twice = (0..groups.len()).any(|at| of_name(&at));
                let headline = match twice {
                    true => format!("more layouts of `{name}` than there are such groups"),
                    false => format!("there is no group `{name}`"),
                };
                let names = groups.iter().map(|group| group.name.as_str());
                let help = match nearest(name, names.clone()) {
                    Some(near) if !twice => format!("did you mean `{near}`?"),
                    Some(_) | None => {
                        format!("the groups are {}", names.collect::<Vec<_>>().join(", "))
                    }
                };
                return Err(usage(flag, headline).help(help));
            };
            found.push((group, layout.trim()));
        }
        Ok(found)
    }
}
