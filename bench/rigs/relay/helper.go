//go:build linux

package main

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
)

// helper is a process of this program: clients or engines. It ends when its stdin is
// closed.
type helper struct {
	process *testbed.Process
	stdin   io.Closer
	send    *gob.Encoder
	receive *gob.Decoder
}

// help starts a helper on some cores.
func (b *bench) help(what string, on cores) (*helper, error) {
	cmd := exec.Command(os.Args[0], what)
	cmd.Env = append(os.Environ(), "GOGC=400")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, into, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = into.Close() }() // the helper has its own
	cmd.ExtraFiles = []*os.File{into}
	p, err := b.start(what, cmd, on)
	if err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return &helper{process: p, stdin: stdin, send: gob.NewEncoder(stdin), receive: gob.NewDecoder(out)}, nil
}

// answers is where a helper writes.
func answers() io.Writer { return os.NewFile(3, "answers") }

func (h *helper) end() {
	_ = h.stdin.Close()
	if h.process.End(5*time.Second) != nil {
		h.process.Kill()
	}
}

// start starts a program on some cores. What it starts runs there too.
func (b *bench) start(name string, cmd *exec.Cmd, on cores) (p *testbed.Process, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("sched_getaffinity: %w", err)
	}
	set := on.set()
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("sched_setaffinity: %w", err)
	}
	p, err = b.world.Start(name, cmd)
	return p, errors.Join(err, unix.SchedSetaffinity(0, &before))
}

// cores are numbers of CPUs.
type cores []int

func (c cores) set() (s unix.CPUSet) {
	for _, n := range c {
		s.Set(n)
	}
	return s
}

// share gives a proxy the last n of the machine's CPUs, and the rest to engines and
// clients; where nothing is left, they have all of them together.
func share(all cores, n int) (proxy, rest cores) {
	n = min(n, len(all))
	if n == len(all) {
		return all, all
	}
	return all[len(all)-n:], all[:len(all)-n]
}

// allCores are the CPUs that this process may use.
func allCores() (list cores, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("sched_getaffinity: %w", err)
	}
	for i := 0; len(list) < set.Count(); i++ {
		if set.IsSet(i) {
			list = append(list, i)
		}
	}
	return list, nil
}

// engineJob is what a process of engines runs: so many, each a rank with its own
// clock, so that they do not all speak at once.
type engineJob struct {
	Role   refengine.Role
	Count  int
	Listen string
	Slots  int
	Step   time.Duration
	Spread bool
}

// phase of an engine: steps of all end one after the other.
func (j engineJob) phase(i int) time.Duration {
	if j.Step == 0 {
		return 0
	}
	return 1 + j.Step*time.Duration(i)/time.Duration(j.Count)
}

// prefills is how many prompts the prefill engine computes at once. evenkeel, which would send it 8
// before it has answered one, is told; the other proxies send it all that they have.
const prefills = 64

// runEngines is the command of a process of engines: it reads a job from stdin and
// tells the URLs.
func runEngines() error {
	in := gob.NewDecoder(os.Stdin)
	var job engineJob
	if err := in.Decode(&job); err != nil {
		return err
	}
	if job.Spread {
		go tick()
	}
	var urls []string
	for i := range job.Count {
		e, err := refengine.Start(refengine.Config{
			Role: job.Role, Slots: job.Slots,
			// an idle connection stays longer than a proxy keeps one: none is closed as it is used
			Server: refengine.Server{Listen: job.Listen, KeepAlive: 75 * time.Second},
			Steps: refengine.Steps{C0: max(job.Step, time.Nanosecond), C1: time.Nanosecond,
				FirstAtOnce: true, Spread: job.Spread, Phase: job.phase(i), Log: 1},
			Prompts: refengine.Prompts{Base: time.Nanosecond, PerToken: time.Nanosecond, Concurrency: prefills},
			KV:      refengine.KV{TransferBase: time.Nanosecond, TransferPer: time.Nanosecond, Tokens: 1 << 24},
		})
		if err != nil {
			return err
		}
		defer e.Close()
		urls = append(urls, e.URLs()...)
	}
	if err := gob.NewEncoder(answers()).Encode(urls); err != nil {
		return err
	}
	var end struct{}
	_ = in.Decode(&end) // returns when stdin is closed
	return nil
}

// tick has this process look at its timers every 100 µs. Otherwise an idle Go program wakes in
// whole milliseconds, and tokens whose times are 50 µs apart would leave together.
func tick() {
	runtime.LockOSThread()
	for {
		_ = unix.Nanosleep(&unix.Timespec{Nsec: int64(100 * time.Microsecond)}, nil) // an error: it was shorter
		runtime.Gosched()
	}
}
