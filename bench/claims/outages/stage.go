package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/rigs/testbed"
)

// outage is what goes wrong, and what was said of it.
type outage struct {
	title, staged string
	steady        time.Duration // before it begins; 0: a minute and a half
	look          time.Duration // after it began the picture is taken; 0: a minute
	build         func(ctx context.Context, s *stage) error
	begin         func(ctx context.Context, s *stage) error
	mend          func(ctx context.Context, s *stage) error

	// kind and engine of the metric evenkeel_incident within a minute; none: it has no series; empty:
	// not looked at
	labels string
	pages  bool // the alert fires

	number   int
	heard    []said
	alerts   string // folder of the test of its alerts
	recorded series
	told     time.Duration // after which the metric had the labels; below 0: it never had them
	calm     time.Duration // after it was mended; below 0: the page was not calm when the watch ended
}

// incident is what is read of one of the page's.
type incident struct {
	ID       int    `json:"id"`
	Kind     string `json:"kind"`
	Subject  string `json:"subject"`
	Severity string `json:"severity"`
	Headline string `json:"headline"`
	What     string `json:"what"`
	Harm     string `json:"harm"`
	UntilMs  int64  `json:"until_ms"`
	Named    string `json:"named"`
	Clients  string `json:"clients"`
	Next     string `json:"next"`
}

// said is what was heard of an incident.
type said struct {
	id       int
	headline string
	at, last time.Duration // after the outage began; below 0: before
	says     string
}

func (s *said) after() string {
	return strconv.FormatFloat(math.Round(s.at.Seconds()), 'f', 0, 64) + " s"
}

const (
	steady    = 90 * time.Second
	lookAfter = time.Minute
	calmAfter = 4 * time.Minute // is waited for at most
	every     = 500 * time.Millisecond
)

// stage is one proxy with its engines and its clients.
type stage struct {
	world   *testbed.World
	proxy   *testbed.Proxy
	engines map[string]*engine
	name    string
	keys    map[string]string
	stops   []func()
	calm    func() // ends what some clients do
	config  string
}

// engine is a process with some ranks.
type engine struct {
	*testbed.Process
	host  string
	port  int
	ranks int
}

func (e *engine) url(rank int) string {
	return fmt.Sprintf("http://%s", net.JoinHostPort(e.host, strconv.Itoa(e.port+rank)))
}

// start starts an engine, or starts it again with other flags.
func (s *stage) start(ctx context.Context, name, host string, ranks int, args ...string) (err error) {
	e := s.engines[name]
	if e == nil {
		e = &engine{host: host, port: ports.take(max(ranks, 1)), ranks: ranks}
		s.engines[name] = e
	}
	args = append([]string{"engine", "--connector", "nixl-pull", "--dp-size", strconv.Itoa(ranks), "--listen",
		net.JoinHostPort(host, strconv.Itoa(e.port))}, args...)
	if e.Process, err = s.world.Start(s.name+"-"+name, exec.Command(s.world.Binary, args...)); err != nil {
		return err
	}
	s.stops = append(s.stops, e.Kill)
	return e.Answers(ctx, 30*time.Second, e.url(0)+"/health")
}

// numbers gives out ports, some in a row.
type numbers struct {
	sync.Mutex
	next int
}

var ports = numbers{next: 21000}

func (n *numbers) take(count int) int {
	n.Lock()
	defer n.Unlock()
	for first := n.next; ; first++ {
		free := true
		for p := first; p < first+count && free; p++ {
			ln, err := net.Listen("tcp", ":"+strconv.Itoa(p))
			if free = err == nil; free {
				_ = ln.Close()
			}
		}
		if free {
			n.next = first + count
			return first
		}
	}
}

// ranks are those of an engine in the config of the proxy.
func (s *stage) ranks(name string, count int, rest string) (list []string) {
	e := s.engines[name]
	for i := range count {
		list = append(list, fmt.Sprintf("url: %q, profile: vllm%s", e.url(i), rest))
	}
	return list
}

// configure is the config of a proxy that has most at its default.
func (s *stage) configure(prefill, decode []string, rest string) string {
	keys := ""
	if len(s.keys) > 0 {
		keys = fmt.Sprintf("keys_file: %q\n", s.world.File(s.name+"-keys.yaml"))
	}
	return fmt.Sprintf("listen: %q\nadmin: {listen: %q}\n%sprofiles: {vllm: {connector: nixl-pull}}\n%s%s",
		s.proxy.Clients, s.proxy.Address, keys, rest, testbed.Engines(prefill, decode))
}

// serve starts the proxy.
func (s *stage) serve(ctx context.Context, config string) error {
	s.config = config
	if err := s.proxy.ServeWith(ctx, config); err != nil {
		return err
	}
	s.stops = append(s.stops, func() { s.proxy.Kill() })
	return nil
}

var newKey = regexp.MustCompile(`ek-\S+`)

// key makes the key of a caller.
func (s *stage) key(names ...string) error {
	file := "keys:\n"
	s.keys = map[string]string{}
	for _, name := range names {
		text, err := exec.Command(s.world.Binary, "keys", "new", "--name", name).Output()
		if err != nil {
			return err
		}
		s.keys[name] = newKey.FindString(string(text))
		_, entry, _ := strings.Cut(string(text), "  - name:")
		file += "  - name:" + entry
	}
	return s.world.Write(s.name+"-keys.yaml", file)
}

// clients are many that ask alike.
type clients struct {
	key            string
	rate           float64 // open loop; 0: closed loop
	concurrency    int
	prompt, answer int
	shared         int // of the prompt's tokens, which each of 20 conversations repeats; 0: none
}

// ask has clients ask until the stop that it returns, or the end of the stage.
func (s *stage) ask(ctx context.Context, c clients) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	requests := make([]trace.Request, 1000)
	for i := range requests {
		requests[i] = trace.Request{Prompt: c.prompt, Output: max(1, c.answer/2+(i*37)%max(1, c.answer)), At: time.Duration(i) * time.Second}
		for b := range c.shared / trace.BlockTokens {
			requests[i].HashIDs = append(requests[i].HashIDs, uint64((i%20)*1000+b))
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil { // again while there is no proxy
			_, _ = load.Run(ctx, load.Config{
				URLs: []string{s.proxy.URL()}, APIKey: s.keys[c.key], Requests: requests, Duration: time.Hour, SharePrefixes: c.shared > 0,
				Rate:        c.rate,
				Concurrency: c.concurrency, Stream: 1, Seed: 1, Backoff: time.Second, Check: load.CheckShape,
			})
			_ = testbed.Pause(ctx, time.Second)
		}
	}()
	end := sync.OnceFunc(func() { cancel(); <-done })
	s.stops = append(s.stops, end)
	return end
}

// stage stages the outage, listens to the page, and takes the picture.
func (o *outage) stage(ctx context.Context, w *testbed.World, c *camera) (err error) {
	s := &stage{world: w, name: fmt.Sprintf("outage%d", o.number), engines: map[string]*engine{}}
	s.proxy = w.Proxies(s.name)[0]
	defer func() {
		for i := range s.stops {
			s.stops[len(s.stops)-1-i]()
		}
	}()
	if err := o.build(ctx, s); err != nil {
		return err
	}
	if o.steady == 0 {
		o.steady = steady
	}
	if o.look == 0 {
		o.look = lookAfter
	}
	ear := &ear{outage: o, began: time.Now().Add(o.steady)}
	o.told = -1
	if err := ear.listen(ctx, s, o.steady, nil); err != nil {
		return err
	}
	ear.began = time.Now()
	began := make(chan error, 1)
	go func() { began <- o.begin(ctx, s) }()
	err = ear.listen(ctx, s, o.look, nil)
	if err := errors.Join(err, <-began); err != nil {
		return err
	}
	if err := c.take(ctx, "http://"+s.proxy.Address+"/", picture(o.number, c.folder)); err != nil {
		return err
	}
	ear.frozen = true
	mended := time.Now()
	if err := o.mend(ctx, s); err != nil {
		return err
	}
	if err := ear.listen(ctx, s, calmAfter, ear.isCalm); err != nil {
		return err
	}
	if o.calm = time.Since(mended); !ear.isCalm() {
		o.calm = -1
	}
	o.heard = sorted(o.heard)
	return o.tryAlerts(ctx, s)
}

// ends says when the page was calm again.
func (o *outage) ends() string {
	if o.calm < 0 {
		return fmt.Sprintf("The page still said that something was wrong %v after it was mended.", calmAfter)
	}
	return fmt.Sprintf("The page said that it was over %.0f s after it was mended.", o.calm.Seconds())
}

// ear reads what the page is made of.
type ear struct {
	outage *outage
	began  time.Time
	open   int       // incidents that last
	frozen bool      // what is said from now on is not a part of the outage
	read   time.Time // when the metric was read last
}

// isCalm says that no incident lasted at the last look.
func (e *ear) isCalm() bool { return e.open == 0 }

// listen listens for so long, or until something is so.
func (e *ear) listen(ctx context.Context, s *stage, lasts time.Duration, until func() bool) error {
	for end := time.Now().Add(lasts); time.Now().Before(end); {
		var d struct {
			Incidents []incident `json:"incidents"`
		}
		if s.proxy.Read("/live?once", &d) {
			for i := range d.Incidents { // the folder of the run says nothing to a reader
				d.Incidents[i].What = strings.ReplaceAll(d.Incidents[i].What, s.world.Dir+"/", "")
			}
			e.hear(time.Since(e.began), d.Incidents)
			if time.Since(e.read) >= scrapeEvery {
				e.read = time.Now()
				e.outage.record(s, e.read, e.read.Sub(e.began))
			}
			if until != nil && until() {
				return nil
			}
		}
		if err := testbed.Pause(ctx, every); err != nil {
			return err
		}
	}
	return nil
}

func (e *ear) hear(at time.Duration, incidents []incident) {
	e.open = 0
	for _, i := range incidents {
		if i.UntilMs != 0 {
			continue
		}
		e.open++
		if e.frozen {
			continue
		}
		harm := ""
		if i.Harm != "" {
			harm = " " + i.Harm + "."
		}
		says := strings.ReplaceAll(fmt.Sprintf("**%s.** %s.%s%s %s %s", i.Headline, strings.TrimSuffix(i.What, "."),
			harm, named(i.Named), italic(i.Clients), i.Next), "|", "\\|")
		if i.Kind != "" {
			says += " `" + strings.TrimSpace(i.Kind+" "+i.Subject) + "`, " + i.Severity
		}
		known := false
		for k := range e.outage.heard {
			if h := &e.outage.heard[k]; h.id == i.ID && h.headline == i.Headline {
				h.says, h.last, known = says, at, true
			}
		}
		if !known {
			e.outage.heard = append(e.outage.heard, said{id: i.ID, headline: i.Headline, at: at, last: at, says: says})
		}
	}
}

func named(text string) string {
	if text == "" {
		return ""
	}
	return " " + text
}

func italic(text string) string {
	if text == "" {
		return ""
	}
	return "*" + text + "*"
}

// camera takes one picture at a time. The browser is in another module, so that a program of that
// module takes it.
type camera struct {
	sync.Mutex
	folder string
}

func (c *camera) take(ctx context.Context, url, file string) error {
	c.Lock()
	defer c.Unlock()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return shoot(ctx, io.Discard, "-await", "evenkeel.document && evenkeel.frames.length > 2", url, file)
}

// shoot runs the program that has the browser.
func shoot(ctx context.Context, out io.Writer, args ...string) error {
	var complaint strings.Builder
	cmd := exec.CommandContext(ctx, "go", append([]string{"run", "evenkeel/bench/outside/camera"}, args...)...)
	cmd.Stdout, cmd.Stderr = out, &complaint
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("bench/outside/camera: %w: %s", err, complaint.String())
	}
	return nil
}

var errNoEngine = errors.New("no such engine")

// of is an engine by its name.
func (s *stage) of(name string) (*engine, error) {
	if e := s.engines[name]; e != nil {
		return e, nil
	}
	return nil, fmt.Errorf("%s: %w", name, errNoEngine)
}
