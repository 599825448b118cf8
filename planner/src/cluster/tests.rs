use super::*;

fn machine() -> Machine {
    Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() }
}

fn errors(text: &str) -> String {
    let diagnostics = Cluster::parse("my.toml", text, &machine()).unwrap_err();
    diagnostics.iter().map(|d| ir::diagnostic::render(d, Some(text))).collect()
}

#[test]
fn presets_read_and_print_and_read_back() {
    for (name, _) in PRESETS {
        let cluster = Cluster::load_on(name, &machine()).unwrap();
        assert_eq!(cluster.name, name);
        let text = cluster.to_string();
        let back = Cluster::parse("back", &text, &machine()).unwrap();
        let plain = |text: String| -> String {
            text.lines()
                .map(|l| l.split('#').next().unwrap_or("").trim_end().to_owned() + "\n")
                .collect()
        };
        assert_eq!(plain(back.to_string()), plain(text));
    }
}

#[test]
fn cpu_ranks_share_cores_and_memory() {
    let cluster = Cluster::load_on("cpu-local", &machine()).unwrap();
    assert_eq!(cluster.describe(), "cpu-local (4 cores, 8.00 GiB, avx2)");
    assert_eq!(cluster.device.memory_bytes.origin, Origin::Measured);
    assert_eq!((cluster.threads(1), cluster.threads(3), cluster.threads(8)), (4, 1, 1));
    assert_eq!(cluster.oversubscription(8), 2.0);
    assert_eq!(cluster.flops_per_s(DType::F32, 2).value, 120e9);
    assert_eq!(cluster.memory(), Memory::PerNode(8 << 30));
}

#[test]
fn files_override_presets_value_by_value() {
    let text = "name = \"mine\"\nextends = \"preset:h100\"\n\
                [[level]]\nname = \"infiniband\"\nlatency = \"9 us\"\n[deployment]\nnodes = 2\n";
    let cluster = Cluster::parse("my.toml", text, &machine()).unwrap();
    assert_eq!(cluster.devices(), Some(16));
    assert_eq!(cluster.link(8).bandwidth_bytes_per_s, 450e9);
    let outer = cluster.level(16);
    assert_eq!((outer.bandwidth.value, outer.latency.value), (50e9, 9e-6));
    assert_eq!(outer.bandwidth.source, "preset:h100");
    assert_eq!(outer.latency.source, "my.toml");
}

#[test]
fn everything_that_is_wrong_is_said_at_once() {
    let text =
        "extends = \"preset:h10\"\nnme = \"x\"\n[[level]]\nname = \"nvlink\"\nbandwidth = 900\n";
    assert_eq!(
        errors(text),
        r#"error[E3002]: unknown key `nme`
 --> my.toml:2:1
  |
2 | nme = "x"
  | ^^^
  = help: did you mean `name`?
error[E3005]: `level.bandwidth` is `900`, which has no unit that fits
 --> my.toml:5:13
  |
5 | bandwidth = 900
  |             ^^^
  = help: write a text with a unit, such as "12.5 GB/s"
error[E3006]: there is no cluster preset `h10`
 --> my.toml:1:11
  |
1 | extends = "preset:h10"
  |           ^^^^^^^^^^^^
  = help: did you mean `h100`?
"#
    );
}

#[test]
fn missing_values_are_named() {
    let text = errors("[device]\nkind = \"gpu\"\n");
    for key in ["device.memory.capacity", "device.launch", "device.peak.f32", "`level`"] {
        assert!(text.contains(key), "{key} is not in\n{text}");
    }
    assert!(errors("kind = ").contains("E3001"));
}

#[test]
fn users_say_what_devices_draw_and_what_hosts_hold() {
    let text = "name = \"mine\"\nextends = \"preset:h100\"\n\
                [device.power]\nbusy = \"1.2 kW\"\nidle = \"300 W\"\n\
                [host]\nmemory = \"1 TB\"\nbandwidth = \"200 GB/s\"\n";
    let cluster = Cluster::parse("my.toml", text, &machine()).unwrap();
    let power = cluster.device.power.clone().unwrap();
    assert_eq!((power.busy_w.value, power.idle_w.value), (1200.0, 300.0));
    assert_eq!(power.joules(10.0, 4.0), 10.0 * 300.0 + 4.0 * 900.0);
    assert_eq!(power.busy_w.source, "my.toml");
    let host = cluster.host.clone();
    assert_eq!(host.memory_bytes.unwrap().value, 1e12);
    assert_eq!(host.bandwidth.unwrap().value, 200e9);
    let back = Cluster::parse("my.toml", &cluster.to_string(), &machine()).unwrap();
    assert_eq!(back.device.power.unwrap().idle_w.value, 300.0);
    assert_eq!(back.host.bandwidth.unwrap().value, 200e9);
    // One number is enough; what waits draws as much then.
    let one = text.replace("idle = \"300 W\"", "");
    let power = Cluster::parse("my.toml", &one, &machine()).unwrap().device.power.unwrap();
    assert_eq!(power.idle_w.value, 1200.0);
    let upside_down = errors(&text.replace("300 W", "3 kW"));
    assert!(upside_down.contains("a busy device draws 1.2 kW, and an idle one 3 kW"));
    assert!(errors(&text.replace("busy = \"1.2 kW\"", "")).contains("device.power.busy"));
    assert!(errors(&text.replace("1.2 kW", "1200")).contains("no unit that fits"));
}

#[test]
fn groups_of_other_devices_are_read_and_printed() {
    let text = "name = \"mixed\"\n[[group]]\nextends = \"preset:h100\"\n\
                [group.deployment]\nnodes = 64\n[[group]]\nextends = \"preset:a100\"\n\
                [group.deployment]\nnodes = 32\n";
    let cluster = Cluster::parse("my.toml", text, &machine()).unwrap();
    assert_eq!((cluster.name.as_str(), cluster.groups.len()), ("mixed", 2));
    assert_eq!(cluster.devices(), Some(8 * (64 + 32)));
    assert_eq!(cluster.groups[1].device.name, "A100 SXM 80 GB");
    let printed = cluster.to_string();
    let back = Cluster::parse("back.toml", &printed, &machine()).unwrap();
    assert_eq!(back.groups[1].levels[1].bandwidth.value, 25e9);
    assert_eq!(back.devices(), cluster.devices());
    let beside = errors(&format!("{text}[deployment]\nnodes = 3\n"));
    assert!(beside.contains("says nothing of devices itself"), "{beside}");
    assert!(errors(&text.replace("a100", "cpu-local")).contains("no group of devices"));
    assert!(errors(&text.replace("a100", "a10000")).contains("no cluster preset `a10000`"));
    assert!(errors(&text.replace("nodes = 32", "nods = 32")).contains("unknown key"));
}

/// Numbers that no device has are doubted, each once; those of presets are not.
#[test]
fn numbers_that_no_device_has_are_doubted() {
    let text = "extends = \"preset:h100\"\n[device.memory]\ncapacity = \"80 TB\"\n\
                [[level]]\nname = \"nvlink\"\nbandwidth = \"1 B/s\"\n\
                [[level]]\nname = \"infiniband\"\nbandwidth = \"400 Gbps\"\n";
    let cluster = Cluster::parse("my.toml", text, &machine()).unwrap();
    assert_eq!(cluster.levels[1].bandwidth.value, 50e9);
    let doubts = cluster.doubts();
    let told: Vec<&str> = doubts.iter().map(|doubt| doubt.headline.as_str()).collect();
    let expected =
        ["80 TB is hardly the memory of a device", "1 B/s is hardly the bandwidth of `nvlink`"];
    assert_eq!(told, expected);
    for (name, text) in PRESETS {
        let preset = Cluster::parse(&format!("preset:{name}"), text, &machine()).unwrap();
        assert_eq!(preset.doubts(), [], "{name}");
    }
}

/// How levels are joined, what devices cost and what lies between groups: read, laid over what a
/// file extends, printed with where it is from, and read back.
#[test]
fn ways_and_prices_are_read_and_printed() {
    let base = "extends = \"preset:h100\"\n[[level]]\nname = \"infiniband\"\ncount = 32\n\
                rails = 4\n[[level]]\nname = \"spine\"\nbandwidth = \"50 GB/s\"\n\
                latency = \"9 us\"\nshape = \"full\"\noversubscription = 2.5\n\
                [deployment.price]\nper_device_hour = \"2.5 USD\"\nas_of = 2026-08-01\n\
                source = \"a contract\"\n";
    let cluster = Cluster::parse("my.toml", base, &machine()).unwrap();
    assert_eq!(cluster.levels[2].bytes_per_s(), 20e9);
    assert_eq!(cluster.levels[1].bytes_per_s(), 50e9);
    let text = cluster.to_string();
    for line in [
        "rails = 4                          # given, my.toml",
        "shape = \"full\"                     # given, my.toml",
        "oversubscription = 2.5             # given, my.toml",
        "per_device_hour = \"2.5 USD\"        # given, my.toml",
        "as_of = \"2026-08-01\"",
        "source = \"a contract\"",
    ] {
        assert!(text.lines().any(|other| other == line), "{line}: {text}");
    }
    let back = Cluster::parse("my.toml", &text, &machine()).unwrap();
    assert_eq!((&back.levels[2], &back.price), (&cluster.levels[2], &cluster.price));
    assert_eq!(back.levels[1].rails, cluster.levels[1].rails);
    assert_eq!(back.price.unwrap().to_string(), "2.5 USD as of 2026-08-01 (a contract)");
    let group = |name: &str, price: &str| {
        format!(
            "[[group]]\nname = {name:?}\nextends = \"preset:h100\"\n[group.deployment.price]\n\
             per_device_hour = \"{price}\"\nas_of = \"2026-08-01\"\n"
        )
    };
    let link = "[[link]]\nbetween = [\"old\", \"new\"]\nbandwidth = \"12.5 GB/s\"\n\
                latency = \"30 us\"\n";
    let text = group("new", "3 EUR") + &group("old", "1 EUR") + link;
    let cluster = Cluster::parse("my.toml", &text, &machine()).unwrap();
    for (one, other) in [(0, 1), (1, 0)] {
        assert_eq!(cluster.between(one, other).unwrap().bandwidth.value, 12.5e9);
    }
    assert!(cluster.between(0, 0).is_none() && cluster.between(0, 2).is_none());
    let back = Cluster::parse("my.toml", &cluster.to_string(), &machine()).unwrap();
    assert_eq!(back.links, cluster.links);
    assert_eq!(back.groups[1].price, cluster.groups[1].price);
    let mut twice = text.clone() + link;
    twice += &link.replace("old", "new").replace("30 us", "30");
    assert!(errors(&twice).contains("which has no unit that fits"));
    let said = errors(&twice.replace("\"30\"", "\"30 us\"").replace("1 EUR", "1 USD"));
    for wrong in ["in EUR, and `old` in USD", "a second link", "a link of `new` with itself"] {
        assert!(said.contains(wrong), "{wrong}: {said}");
    }
    assert!(errors(&text.replace("[\"old\"", "[\"olds\"")).contains("did you mean `old`?"));
    // A group that is wrong in itself is there all the same.
    let incomplete = text.replace("\"old\"\nextends = \"preset:h100\"", "\"old\"");
    assert!(!errors(&incomplete).contains("there is no group"), "{}", errors(&incomplete));
    assert!(errors(&format!("extends = \"preset:h100\"\n{link}")).contains("no group `old`"));
}

#[test]
fn a_file_that_extends_itself_is_found() {
    let folder = std::env::temp_dir().join(format!("gantline-cluster-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (a, b) = (folder.join("a.toml"), folder.join("b.toml"));
    std::fs::write(&a, "extends = \"file:b.toml\"\n").unwrap();
    let there = folder.file_name().unwrap().to_str().unwrap();
    for back in ["a.toml", "./a.toml", &format!("../{there}/a.toml")] {
        std::fs::write(&b, format!("extends = \"file:{back}\"\n")).unwrap();
        let found = Cluster::load_on(&a, &machine()).unwrap_err();
        assert_eq!(found[0].headline, "a cluster extends itself", "{back}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// What no cluster can be is refused, with a place and a reason; none of it panics.
#[test]
fn clusters_that_cannot_be_are_refused() {
    let level = |more: &str| format!("[[level]]\nname = \"nvlink\"\n{more}\n");
    let price = |money: &str, day: &str| {
        format!("[deployment.price]\nper_device_hour = {money:?}\nas_of = {day:?}\n")
    };
    let node = |each: &str, nodes: &str| {
        format!("[deployment]\ndevices_per_node = {each}\nnodes = {nodes}\n")
    };
    for (text, code, said) in [
        (node("8", "9223372036854775807"), "E3004", "more than 1073741824"),
        (node("1099511627776", "1"), "E3004", "more than 1073741824"),
        (node("8", "1000000000"), "E3004", "more than 1073741824 devices"),
        (level("bandwidth = \"0 GB/s\""), "E3005", "`level.bandwidth` is 0"),
        ("[host]\nmemory = \"0 GB\"\n".into(), "E3005", "`host.memory` is 0"),
        ("[host]\nbandwidth = \"0 GB/s\"\n".into(), "E3005", "`host.bandwidth` is 0"),
        ("[device.peak]\nbf16 = \"0 TFLOP/s\"\n".into(), "E3005", "`peak.bf16` is 0"),
        ("[device.memory]\nbandwidth = \"0 B/s\"\n".into(), "E3005", "`memory.bandwidth` is 0"),
        ("[device.memory]\ncapacity = \"0 GiB\"\n".into(), "E3005", "`memory.capacity` is 0"),
        ("[device.memory]\nreserved = \"100 GiB\"\n".into(), "E3004", "100 GiB are reserved"),
        (level("count = 3"), "E3004", "`nvlink` spans 3 devices, and a node has 8"),
        ("[[level]]\nlatency = \"1 us\"\n".into(), "E3003", "has no `name`"),
        (level("oversubscription = 0.5"), "E3004", "`level.oversubscription` is `0.5`, no ratio"),
        (level("oversubscription = \"2:1\""), "E3004", "is `2:1`, no ratio"),
        (level("oversubscription = 1e9"), "E3004", "no ratio"),
        (level("shape = \"fat-tree\""), "E3004", "`shape` is `fat-tree`, which is not known"),
        (level("rails = 8"), "E3004", "has rails, and does not join nodes"),
        (level("rails = 0"), "E3004", "`level.rails` is 0"),
        (
            level("").replace("nvlink", "infiniband") + "rails = 3\n",
            "E3004",
            "has 3 rails, and a node 8 devices",
        ),
        ("[deployment]\nprice = 2\n".into(), "E3004", "`deployment.price` is a whole number"),
        (price("2.50", "2026-01-01"), "E3005", "is `2.50`, no price with its currency"),
        (price("-2 USD", "2026-01-01"), "E3005", "no price with its currency"),
        (price("2 dollars", "2026-01-01"), "E3005", "no price with its currency"),
        (price("2 USD", "yesterday"), "E3004", "`price.as_of` is `yesterday`, and no day"),
        (price("2 USD", "2026-13-01"), "E3004", "and no day"),
        (
            "[deployment.price]\nper_device_hour = \"2 USD\"\n".into(),
            "E3003",
            "there is no `price.as_of`",
        ),
        (
            "[[level]]\nname = \"spine\"\nbandwidth = \"1 GB/s\"\nlatency = \"1 us\"\n".into(),
            "E3004",
            "`infiniband` has no end, and `spine` lies beyond it",
        ),
    ] {
        let text = format!("extends = \"preset:h100\"\n{text}");
        let wrong = Cluster::parse("my.toml", &text, &machine()).unwrap_err();
        let found = wrong.iter().any(|d| d.code == code && d.headline.contains(said));
        assert!(found, "{text}: {wrong:?}");
    }
    let billion = "extends = \"preset:h100\"\n[group.deployment]\nnodes = 100000000\n";
    let billion = format!("[[group]]\n{billion}").replace("[group.", "[group.").repeat(2);
    let wrong = Cluster::parse("my.toml", &billion, &machine()).unwrap_err();
    assert!(wrong[0].headline.contains("more than 1073741824 devices"), "{wrong:?}");
}

/// A file of groups says what devices are; what is laid over it cannot.
#[test]
fn nothing_is_laid_over_groups() {
    let folder = std::env::temp_dir().join(format!("gantline-groups-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let group = "[[group]]\nextends = \"preset:h100\"\n";
    std::fs::write(folder.join("mix.toml"), format!("{group}{group}")).unwrap();
    let read = |text: &str| {
        let path = folder.join("over.toml");
        Cluster::parse(path.to_str().unwrap(), text, &machine())
    };
    let named = read("name = \"two\"\nextends = \"file:mix.toml\"\n").unwrap();
    assert_eq!((named.name.as_str(), named.groups.len()), ("two", 2));
    let wrong = read("extends = \"file:mix.toml\"\n[deployment]\nnodes = 9\n").unwrap_err();
    assert_eq!(wrong[0].code, "E3004", "{wrong:?}");
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Names of any letters read back.
#[test]
fn names_read_back() {
    for name in ["a\u{7f}", "quo\"te\\", "tab\tline\nend", "\u{85}\u{1b}é日"] {
        let mut cluster = Cluster::load_on("h100", &machine()).unwrap();
        cluster.name = name.to_owned();
        cluster.levels[0].name = name.to_owned();
        cluster.device.name = name.to_owned();
        cluster.device.launch_s.source = name.to_owned();
        let back = Cluster::parse("back", &cluster.to_string(), &machine()).unwrap();
        let names = [&back.name, &back.levels[0].name, &back.device.name];
        assert!(names.iter().all(|read| *read == name), "{name:?}: {names:?}");
    }
}

/// What could not be read and what cannot be are told at once, and nothing that only follows from
/// what could not be read.
#[test]
fn all_that_is_wrong_is_told_at_once() {
    let told = |text: &str| {
        let wrong = Cluster::parse("my.toml", text, &machine()).unwrap_err();
        wrong.into_iter().map(|d| d.code.to_owned() + " " + &d.headline).collect::<Vec<_>>()
    };
    let text = "extends = \"preset:h100\"\n[host]\nmemory = 3\n[device.memory]\n\
                reserved = \"100 GiB\"\n[device.power]\nbusy = \"1 W\"\nidle = \"2 W\"\n\
                [[level]]\nname = \"nvlink\"\ncount = 3\n[deployment]\nnodes = 1000000000\n";
    let found = told(text);
    for said in [
        "`host.memory` is `3`",
        "100 GiB are reserved",
        "draws 1 W, and an idle one 2 W",
        "`nvlink` spans 3 devices",
        "more than 1073741824 devices",
    ] {
        assert_eq!(found.iter().filter(|one| one.contains(said)).count(), 1, "{said}: {found:?}");
    }
    assert_eq!(found.len(), 5, "{found:?}");
    // What cannot be read is neither missing nor compared.
    for (text, said) in [
        ("extends = \"preset:h100\"\n[[level]]\nname = \"nvlink\"\ncount = \"3\"\n", "level.count"),
        ("extends = \"preset:h1000\"\n", "no cluster preset"),
        (
            "extends = \"preset:h100\"\n[device.memory]\ncapacity = \"1 kB\"\nreserved = 3\n",
            "reserved",
        ),
        ("extends = \"preset:h100\"\n[device.power]\nbusy = \"1 W\"\nidle = 3\n", "power.idle"),
        (
            "[device]\nkind = \"gpu\"\nlaunch = \"4 us\"\nextra = 3\n[device.memory]\n\
          capacity = \"80 GiB\"\nbandwidth = \"3 TB/s\"\n[device.peak]\nf32 = \"60 TFLOP/s\"\n\
          [deployment]\ndevices_per_node = 8\n[[level]]\nname = \"a\"\nlatency = \"1 us\"\n\
          bandwidth = 3\n",
            "device.extra",
        ),
    ] {
        let found = told(text);
        let extra = usize::from(said == "device.extra");
        assert_eq!(found.len(), 1 + extra, "{found:?}");
        assert!(found[0].contains(said), "{found:?}");
    }
    // What is missing elsewhere is.
    let found = told("[device]\nkind = \"gpu\"\nlaunch = 4\n[device.peak]\nf32 = \"6 TFLOP/s\"\n");
    let missing = found.iter().filter(|one| one.starts_with("E3003")).count();
    assert_eq!((found.len(), missing), (5, 4), "{found:?}");
}

/// A number with its unit is told why it cannot be one.
#[test]
fn numbers_are_refused_for_what_they_are() {
    for (number, said) in [
        ("\"1e30 GiB\"", "more than there can be"),
        ("\"1.2.3 GiB\"", "whose number cannot be read"),
        ("\"1e999 GiB\"", "whose number cannot be read"),
        ("\"-1e3 GiB\"", "which is negative"),
        ("\"80 Gigs\"", "which has no unit that fits"),
        ("80", "which has no unit that fits"),
    ] {
        let text = format!("extends = \"preset:h100\"\n[device.memory]\ncapacity = {number}\n");
        let found = errors(&text);
        assert!(found.contains(said), "{number}: {found}");
    }
    let text = "extends = \"preset:h100\"\n[device.memory]\ncapacity = \"9.6e1 GiB\"\n";
    let cluster = Cluster::parse("my.toml", text, &machine()).unwrap();
    assert_eq!(cluster.device.memory_bytes.value, 96.0 * 1_073_741_824.0);
}
