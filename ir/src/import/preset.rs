//! Models that need no file: published ones, and a small one to try things with.

use super::config::fields::Fields;
use super::family::{families, read_family};
use super::{Architecture, Description};

/// The names of all presets, in the order of their families.
pub fn presets() -> impl Iterator<Item = &'static str> {
    families().iter().flat_map(|family| &family.presets).map(|preset| preset.name)
}

/// The preset of a name.
pub fn preset(name: &str) -> Option<Description> {
    let mut all = families().iter().flat_map(|f| f.presets.iter().map(move |preset| (f, preset)));
    let (family, preset) = all.find(|(_, preset)| preset.name == name)?;
    let mut fields = Fields::parse(preset.name, preset.config).ok()?;
    let model = read_family(&mut fields, family);
    fields.finish().ok()?;
    let architecture = Architecture::Family(Box::new(model));
    let (name, stored) = (name.to_owned(), Some(preset.dtype));
    Some(Description { name, architecture, stored, scaled: None, warnings: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::import::{Options, import};

    /// The counts are the published ones, the fields are known, and the module is a text.
    #[test]
    fn presets_have_the_published_sizes() {
        for (family, preset) in
            families().iter().flat_map(|f| f.presets.iter().map(move |p| (f, p)))
        {
            let name = preset.name;
            let mut fields = Fields::parse(name, preset.config).unwrap();
            read_family(&mut fields, family);
            assert_eq!(fields.finish(), Ok(Vec::new()), "{name}");
            let description = super::preset(name).unwrap();
            let options = Options { seq: 64, dtype: DType::F32, dropout: None, documents: false };
            let model = import(&description, &options).unwrap();
            assert_eq!(model.param_count(), preset.count, "{name}");
            let printed = model.module.to_string();
            let read = crate::text::parse_module("printed", &printed).unwrap();
            assert!(read == model.module, "{name} prints and reads back");
        }
    }
}
