//! How processes that were started together find each other.
//!
//! All come to the first one's port and say who they are. When all have come it tells each where
//! the others listen, and every two of these connect. Whoever listens sends a challenge first, and
//! whoever comes proves with it that it knows the secret of the run, where there is one.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Error;

use super::launch::Launch;
use super::refusal;

/// How long a process waits for the others. Chosen: schedulers start the processes of a job within
/// minutes, and the first one may plan for some.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long one that has come may take to say who it is, and to be connected with.
const SHORT: Duration = Duration::from_secs(30);
/// How often it is looked whether one has come.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes of what is said in a meeting, at most.
const SAID_BYTES_MAX: u32 = 1 << 20;
/// What a process begins with.
const MAGIC: [u8; 8] = *b"gantline";

/// What a process says when it comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    magic: [u8; 8],
    version: String,
    job: String,
    process: usize,
    count: usize,
    /// Where it listens.
    port: u16,
    /// What the one that listens proves itself with.
    challenge: [u8; 32],
    /// That it knows the secret.
    proof: [u8; 32],
}

/// What the first process answers.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// All have come; where each listens, the first one aside, and that it knows the secret.
    All(Vec<SocketAddr>, [u8; 32]),
    /// It is none of them.
    Refused(String),
}

/// The other processes of a run, connected.
#[derive(Debug)]
pub struct Peers {
    /// Which of them this one is.
    pub(super) launch: Launch,
    /// By process; none for this one.
    pub(super) connections: Vec<Option<TcpStream>>,
}

impl Peers {
    /// The number of processes, this one included.
    pub fn count(&self) -> usize {
        self.launch.count
    }

    /// This process.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }
}

impl Launch {
    /// Meets the other processes. The first one waits for all, the others for the first.
    ///
    /// # Errors
    /// Not all come in time; one is of another version or another run; no connection between two.
    pub fn meet(self) -> Result<Peers, Error> {
        if self.process == 0 { self.lead() } else { self.follow() }
    }

    fn hello(&self, port: u16, challenge: [u8; 32]) -> Hello {
        let mut hello = Hello {
            magic: MAGIC,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            job: self.job.clone(),
            process: self.process,
            count: self.count,
            port,
            challenge: fresh(),
            proof: [0; 32],
        };
        hello.proof = self.proof_of(&hello, challenge);
        hello
    }

    /// What proves that who says this, after a challenge, knows the secret.
    fn proof_of(&self, hello: &Hello, challenge: [u8; 32]) -> [u8; 32] {
        let said = (Hello { proof: [0; 32], ..hello.clone() }, challenge);
        self.secret.prove(&postcard::to_stdvec(&said).unwrap_or_default())
    }

    /// What a process says that has come; none where it is no process of ours.
    fn receive(&self, stream: &mut TcpStream) -> Option<(Hello, bool)> {
        let challenge = fresh();
        say(stream, &challenge).ok()?;
        let hello: Hello = take(stream).ok().filter(|hello: &Hello| hello.magic == MAGIC)?;
        let knows = hello.proof == self.proof_of(&hello, challenge);
        Some((hello, knows))
    }

    /// Says who this is, to one that listens.
    fn introduce(&self, stream: &mut TcpStream, port: u16) -> io::Result<Hello> {
        let hello = self.hello(port, take(stream)?);
        say(stream, &hello)?;
        Ok(hello)
    }

    fn lead(self) -> Result<Peers, Error> {
        let port = self.leader.1;
        let taken = |why: io::Error| {
            let help = "set MASTER_PORT, for all processes, to a port that is free";
            refusal(format!("the first process can't listen on port {port}: {why}"), help)
        };
        let door = Door::new(&self, listen(port).map_err(taken)?);
        let mut come: Vec<Option<Come>> = Vec::new();
        come.resize_with(self.count, || None);
        let since = Instant::now();
        while come.iter().skip(1).any(Option::is_none) {
            let Some(Guest { mut stream, from, hello, knows }) = door.next(since, PATIENCE) else {
                return Err(self.missing(&come));
            };
            let is_free = hello.process > 0 && come.get(hello.process).is_some_and(Option::is_none);
            if let Some(why) = self.doubt(&hello, knows, is_free) {
                let _ = say(&mut stream, &Answer::Refused(why));
                continue;
            }
            let listens = SocketAddr::new(from, hello.port);
            come[hello.process] = Some(Come { stream, listens, challenge: hello.challenge });
        }
        let mut addresses: Vec<SocketAddr> = come.iter().flatten().map(|it| it.listens).collect();
        if addresses.iter().any(|at| !at.ip().is_loopback()) {
            // Others know this machine by the name that they know the first process by.
            let own = addresses_of(&self.leader).find(|at| !at.ip().is_loopback());
            for at in addresses.iter_mut().filter(|at| at.ip().is_loopback()) {
                at.set_ip(own.map_or(at.ip(), |own| own.ip()));
            }
        }
        let mut connections = Vec::new();
        for one in come {
            let connection = one.map(|Come { mut stream, challenge, .. }| {
                let proof = self.secret.prove(&challenge);
                say(&mut stream, &Answer::All(addresses.clone(), proof))?;
                settle(stream)
            });
            let lost = |why: io::Error| lost_at(connections.len(), &why);
            connections.push(connection.transpose().map_err(lost)?);
        }
        Ok(Peers { launch: self, connections })
    }

    /// Why whoever says this is not the process that is waited for.
    fn doubt(&self, hello: &Hello, knows: bool, is_free: bool) -> Option<String> {
        let version = env!("CARGO_PKG_VERSION");
        if hello.version != version {
            return Some(format!("it is of version {version}, and not {}", hello.version));
        }
        if !knows {
            return Some("its GANTLINE_SECRET is another".to_owned());
        }
        if (&hello.job, hello.count) != (&self.job, self.count) {
            return Some("it is of another run".to_owned());
        }
        (!is_free).then(|| format!("another process has the number {}", hello.process))
    }

    fn missing(&self, come: &[Option<Come>]) -> Error {
        let missing = come.iter().enumerate().skip(1).filter(|(_, one)| one.is_none());
        let numbers: Vec<String> = missing.map(|(number, _)| number.to_string()).collect();
        let (count, minutes) = (self.count, PATIENCE.as_secs() / 60);
        let missing = numbers.join(", ");
        let reason = format!("of {count} processes, {missing} did not come in {minutes} min");
        refusal(
            reason,
            "the launcher says why they did not start; MASTER_ADDR is to reach this one",
        )
    }

    fn follow(self) -> Result<Peers, Error> {
        let own = |why: io::Error| {
            refusal(format!("this process can't listen: {why}"), "look at the limits of the system")
        };
        let listener = listen(0).map_err(own)?;
        let port = listener.local_addr().map_err(own)?.port();
        let mut leader = self.reach()?;
        let (host, at) = &self.leader;
        let silent = |why: io::Error| {
            let help = "its message says why, or `MASTER_ADDR` and `MASTER_PORT` name another one";
            refusal(format!("the first process, on {host}:{at}, does not answer: {why}"), help)
        };
        let hello = self.introduce(&mut leader, port).map_err(silent)?;
        let own_proof = self.secret.prove(&hello.challenge);
        let addresses = match take_in::<Answer>(&mut leader, PATIENCE).map_err(silent)? {
            Answer::All(addresses, proof)
                if proof == own_proof && addresses.len() + 1 == self.count =>
            {
                addresses
            }
            Answer::All(..) => return Err(silent(io::ErrorKind::InvalidData.into())),
            Answer::Refused(why) => {
                let reason = format!("the first process, on {host}:{at}, refuses this one: {why}");
                return Err(refusal(reason, "start all processes of a run with one command"));
            }
        };
        let mut connections: Vec<Option<TcpStream>> = Vec::new();
        connections.resize_with(self.count, || None);
        connections[0] = Some(settle(leader).map_err(silent)?);
        for (process, address) in addresses.iter().enumerate().map(|(at, it)| (at + 1, it)) {
            if process >= self.process {
                break;
            }
            let reached = TcpStream::connect_timeout(address, SHORT).and_then(|mut stream| {
                self.introduce(&mut stream, port)?;
                settle(stream)
            });
            connections[process] = Some(reached.map_err(|why| lost_at(process, &why))?);
        }
        let (since, door) = (Instant::now(), Door::new(&self, listener));
        while let Some(missing) =
            (self.process + 1..self.count).find(|&at| connections[at].is_none())
        {
            let Some(Guest { stream, hello, knows, .. }) = door.next(since, SHORT) else {
                return Err(lost_at(missing, &io::ErrorKind::TimedOut.into()));
            };
            let is_free = hello.process > self.process
                && connections.get(hello.process).is_some_and(Option::is_none);
            if self.doubt(&hello, knows, is_free).is_none() {
                let settled = settle(stream).map_err(|why| lost_at(hello.process, &why))?;
                connections[hello.process] = Some(settled);
            }
        }
        Ok(Peers { launch: self, connections })
    }

    /// A connection to the first process, as soon as it listens.
    fn reach(&self) -> Result<TcpStream, Error> {
        let since = Instant::now();
        loop {
            let mut addresses = addresses_of(&self.leader);
            let found = addresses.find_map(|at| TcpStream::connect_timeout(&at, SHORT).ok());
            if let Some(stream) = found {
                return Ok(stream);
            }
            if since.elapsed() > PATIENCE {
                let (host, port) = &self.leader;
                let minutes = PATIENCE.as_secs() / 60;
                let reason = format!("nothing listens on {host}:{port} after {minutes} min");
                let help = "MASTER_ADDR and MASTER_PORT say where the first process is";
                return Err(refusal(reason, help));
            }
            sleep(PAUSE);
        }
    }
}

/// A process that has come.
struct Come {
    stream: TcpStream,
    /// Where it does so.
    listens: SocketAddr,
    /// What the first one proves itself with.
    challenge: [u8; 32],
}

/// Bytes that nobody has seen before.
fn fresh() -> [u8; 32] {
    let mut bytes = [0; 32];
    for part in bytes.as_chunks_mut::<8>().0 {
        *part = RandomState::new().hash_one(std::process::id()).to_le_bytes();
    }
    bytes
}

fn addresses_of((host, port): &(String, u16)) -> impl Iterator<Item = SocketAddr> + use<> {
    (host.as_str(), *port).to_socket_addrs().into_iter().flatten()
}

/// Listens on all addresses of this machine.
fn listen(port: u16) -> io::Result<TcpListener> {
    let all = [IpAddr::from([0_u16; 8]), IpAddr::from([0_u8; 4])];
    let listener = TcpListener::bind(all.map(|ip| SocketAddr::new(ip, port)).as_slice())?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Where processes come. Each has a thread to say who it is to, so that nobody waits for one that
/// says nothing.
struct Door<'a> {
    launch: &'a Launch,
    listener: TcpListener,
    come: (Sender<Guest>, Receiver<Guest>),
}

/// Somebody who has said that it is a process of ours.
struct Guest {
    stream: TcpStream,
    from: IpAddr,
    hello: Hello,
    /// Whether it knows the secret.
    knows: bool,
}

impl Door<'_> {
    fn new(launch: &Launch, listener: TcpListener) -> Door<'_> {
        Door { launch, listener, come: channel() }
    }

    /// The next one that comes; none after some time.
    fn next(&self, since: Instant, patience: Duration) -> Option<Guest> {
        while since.elapsed() < patience {
            if let Ok((mut stream, from)) = self.listener.accept() {
                let (launch, sender) = (self.launch.clone(), self.come.0.clone());
                let receive = move || {
                    stream.set_nonblocking(false).ok()?;
                    let (hello, knows) = launch.receive(&mut stream)?;
                    let from = from.ip().to_canonical();
                    sender.send(Guest { stream, from, hello, knows }).ok()
                };
                // Where there is no thread for it, it comes again.
                let _ = thread::Builder::new().name("meeting".to_owned()).spawn(receive);
            } else if let Ok(guest) = self.come.1.recv_timeout(PAUSE) {
                return Some(guest);
            }
        }
        None
    }
}

/// Makes a connection ready for frames.
fn settle(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_read_timeout(None)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn say(stream: &mut TcpStream, said: &impl Serialize) -> io::Result<()> {
    stream.set_write_timeout(Some(SHORT))?;
    let bytes = postcard::to_stdvec(said).map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_le_bytes(), bytes.as_slice()].concat())
}

fn take<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    take_in(stream, SHORT)
}

fn take_in<T: DeserializeOwned>(stream: &mut TcpStream, patience: Duration) -> io::Result<T> {
    stream.set_read_timeout(Some(patience))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > SAID_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(io::Error::other)
}

fn lost_at(process: usize, why: &io::Error) -> Error {
    let reason = format!("no connection with process {process}: {why}");
    refusal(reason, "all machines of a run are to reach each other, on any port")
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::{AtomicU16, Ordering};

    use super::super::launch::Secret;
    use super::*;

    /// A port that the system gives nobody by itself.
    fn port() -> u16 {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let first = 20_000 + (std::process::id() % 1000) as u16 * 10;
        let next = || first + NEXT.fetch_add(1, Ordering::Relaxed);
        let mut free = std::iter::repeat_with(next).filter(|at| listen(*at).is_ok());
        free.next().unwrap()
    }

    /// Processes that are threads, connected over this machine's own network.
    pub(in crate::processes) fn meet(count: usize) -> Vec<Peers> {
        let free = port();
        let launch = |process| Launch {
            process,
            count,
            local: (process, count),
            leader: ("127.0.0.1".to_owned(), free),
            job: "test".to_owned(),
            secret: Secret::of("s"),
        };
        let all = (0..count).map(|process| {
            let launch = launch(process);
            std::thread::spawn(move || launch.meet().unwrap())
        });
        let all: Vec<_> = all.collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    }

    #[test]
    fn every_two_processes_are_connected() {
        for count in 2..6 {
            let mut all = meet(count);
            for (a, of_process) in all.iter().enumerate() {
                let mut others = of_process.connections.iter().enumerate();
                assert!(others.all(|(b, one)| one.is_some() == (a != b)));
            }
            for (a, b) in (0..count).flat_map(|a| (0..count).map(move |b| (a, b))) {
                if let Some(stream) = &mut all[a].connections[b] {
                    stream.write_all(&[a as u8]).unwrap();
                }
                if let Some(stream) = &mut all[b].connections[a] {
                    let mut said = [0];
                    stream.read_exact(&mut said).unwrap();
                    assert_eq!(said, [a as u8], "both ends are of the same two processes");
                }
            }
        }
    }

    #[test]
    fn others_are_refused_and_not_waited_for() {
        let free = port();
        let launch = |process, job: &str, secret| Launch {
            process,
            count: 2,
            local: (process, 2),
            leader: ("127.0.0.1".to_owned(), free),
            job: job.to_owned(),
            secret: Secret::of(secret),
        };
        let leader = launch(0, "a", "s");
        let leader = std::thread::spawn(move || leader.meet());
        let mut stranger = launch(1, "a", "s").reach().unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        for (job, secret, wanted) in [("b", "s", "another run"), ("a", "t", "GANTLINE_SECRET")] {
            let refused = launch(1, job, secret).meet().unwrap_err();
            assert!(refused.to_string().contains(wanted), "{refused}");
        }
        // Who listened to another one's proof can't use it again.
        let [mut first, mut second] = [0; 2].map(|_| launch(1, "a", "s").reach().unwrap());
        let hello = launch(1, "a", "s").hello(1, take(&mut first).unwrap());
        take::<[u8; 32]>(&mut second).unwrap();
        drop(first);
        say(&mut second, &hello).unwrap();
        let answer = take::<Answer>(&mut second).unwrap();
        assert!(matches!(answer, Answer::Refused(why) if why.contains("GANTLINE_SECRET")));
        launch(1, "a", "s").meet().unwrap();
        leader.join().unwrap().unwrap();
    }
}
