package geosim

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
)

// Scenario is what runs: regions, how far they are apart, what their clients
// do, and what breaks.
type Scenario struct {
	Name     string
	Regions  []Region
	RTTMs    [][]float64 // between regions; on the diagonal between a client and its own dispatcher
	Engine   Engine
	WarmS    float64 // not measured
	MeasureS float64
	ProbeMs  float64
	ScrapeMs float64 // of the engines, by their own dispatcher
	USDPerGB float64 // either way
	Faults   []Fault
}

// Region has replicas, one dispatcher, and clients.
type Region struct {
	Name     string
	Replicas int
	Load     Load
}

// Load is what a region's clients do.
type Load struct {
	Kind    Kind
	Clients int
	ThinkMs float64 // between an answer and the next turn

	Turns  float64 // conversations: mean
	Prompt float64 // median of what a user says, tokens
	Output float64 // median of an answer

	Branches, Depth int // trees

	Peak  float64 // a day's peak over its trough; 0 or 1: level. Clients is the mean
	Phase float64 // of the day, 0 to 1
}

// Kind is a sort of program.
type Kind uint8

// The kinds.
const (
	conversation Kind = iota
	treeOfThoughts
)

var kindWords = []string{"multi-turn", "tot"}

func (k Kind) String() string { return kindWords[k] }

// Fault is something that breaks at a time and is whole again later.
type Fault struct {
	Kind   FaultKind
	Region int
	Other  int // partition: from whom
	AtS    float64
	ForS   float64
}

// FaultKind is what breaks.
type FaultKind uint8

// The faults.
const (
	Dies      FaultKind = iota // the dispatcher: what it had is gone
	Partition                  // nothing passes between two regions
	Drains                     // the dispatcher takes no forwards
	Upgrades                   // the dispatcher speaks another major version
)

var faultWords = []string{"dies", "partition", "drains", "version"}

func (k FaultKind) String() string { return faultWords[k] }

func (s *Scenario) warmMs() float64 { return 1000 * s.WarmS }
func (s *Scenario) endMs() float64  { return 1000 * (s.WarmS + s.MeasureS) }

// most is how many clients a region has at its peak.
func (l *Load) most() int {
	if l.Peak <= 1 {
		return l.Clients
	}
	return int(math.Ceil(float64(l.Clients) * (1 + l.swing())))
}

// swing is how far the sinusoid goes from its mean, which peak over trough
// says.
func (l *Load) swing() float64 { return (l.Peak - 1) / (l.Peak + 1) }

// active clients at a time; the measured part is one day.
func (l *Load) active(nowMs float64, s *Scenario) int {
	if l.Peak <= 1 {
		return l.Clients
	}
	day := (nowMs - s.warmMs()) / (1000 * s.MeasureS)
	return int(math.Round(float64(l.Clients) * (1 + l.swing()*math.Sin(2*math.Pi*(day+l.Phase)))))
}

// Peaks are the most clients of all regions at once in a day, and the sum of
// each region's most.
func (s *Scenario) Peaks() (most, sum int) {
	const steps = 1440
	tops := make([]int, len(s.Regions))
	for i := range steps {
		now, all := s.warmMs()+1000*s.MeasureS*float64(i)/steps, 0
		for k := range s.Regions {
			n := s.Regions[k].Load.active(now, s)
			tops[k], all = max(tops[k], n), all+n
		}
		most = max(most, all)
	}
	for _, n := range tops {
		sum += n
	}
	return most, sum
}

// Names lists the scenarios that need no file.
func Names() []string {
	return []string{"multi-turn", "multi-turn-uneven", "tot", "tot-mixed", "skew", "diurnal", "gorgo", "tot-uniform", "one-region", "dies", "partition", "drains", "version"}
}

// Presets lists the engines that have a name.
func Presets() []string {
	names := make([]string, 0, len(presets))
	for name := range presets {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// defaultRTT is between A (US-West), B and C: S1 2.4 for those from A, ours for
// the third.
func defaultRTT() [][]float64 {
	return [][]float64{{3, 183, 281}, {183, 3, 70}, {281, 70, 3}}
}

// WithPreset puts the engine of a name into the scenario, and lets it run as
// long as so fast an engine needs to.
func (s *Scenario) WithPreset(name string) error {
	e, ok := presets[name]
	if !ok {
		return fmt.Errorf("unknown preset %q; there are %s", name, strings.Join(Presets(), ", "))
	}
	s.Engine = e
	return nil
}

// Named returns a scenario of geo 11, M3 or a fault of its kind, on a preset.
func Named(name, preset string) (*Scenario, error) {
	s := &Scenario{
		Name: name, RTTMs: defaultRTT(), ProbeMs: 500, ScrapeMs: 500, USDPerGB: 0.02, WarmS: 40, MeasureS: 200,
	}
	if err := s.WithPreset(preset); err != nil {
		return nil, err
	}
	if s.Engine.StepMs < 30 { // a fast engine answers as much in less time
		s.WarmS, s.MeasureS = 15, 75
	}
	chat := func(clients int) Load { return Load{Clients: clients, Turns: 5, Prompt: said, Output: answered} }
	tot := func(clients, branches int) Load {
		return Load{Kind: treeOfThoughts, Clients: clients, Branches: branches, Depth: 4, Output: 100}
	}
	day := func(clients int, peak, phase float64) Load {
		l := chat(clients)
		l.Peak, l.Phase = peak, phase
		return l
	}
	var loads [3]Load
	replicas := 4
	switch name {
	case "multi-turn", "dies", "partition", "drains", "version":
		loads = [3]Load{chat(80), chat(80), chat(80)}
	case "multi-turn-uneven":
		loads = [3]Load{chat(40), chat(30), chat(30)}
	case "tot":
		loads = [3]Load{tot(40, 2), tot(20, 2), tot(20, 2)}
	case "tot-uniform":
		loads = [3]Load{tot(27, 2), tot(27, 2), tot(27, 2)}
	case "tot-mixed":
		loads = [3]Load{tot(2, 4), tot(20, 2), tot(20, 2)}
	case "skew":
		loads = [3]Load{chat(120), chat(40), chat(40)}
	case "diurnal":
		loads = [3]Load{day(67, 2.9, 0), day(67, 8, 1./3), day(67, 32, 2./3)}
	case "gorgo":
		loads, replicas = [3]Load{chat(4), chat(3), chat(3)}, 1
		s.WarmS, s.MeasureS = 0, 60
	case "one-region":
	default:
		return nil, fmt.Errorf("unknown scenario %q; there are %s, or give a file", name, strings.Join(Names(), ", "))
	}
	if name == "one-region" { // S0 figure 9
		s.Regions, s.RTTMs = []Region{{Name: "a", Replicas: 4, Load: tot(30, 2)}}, [][]float64{{3}}
		return s, s.Validate()
	}
	for i, l := range loads {
		s.Regions = append(s.Regions, Region{Name: string(rune('a' + i)), Replicas: replicas, Load: l})
	}
	if at := slices.Index(faultWords, name); at >= 0 {
		s.Regions[0].Load.Clients, s.Regions[2].Load.Clients = 120, 40 // so that there are forwards to break
		s.Faults = []Fault{{Kind: FaultKind(at), Region: 1, Other: 0, AtS: s.WarmS + s.MeasureS/4, ForS: s.MeasureS / 4}}
	}
	return s, s.Validate()
}

// Validate says what cannot run.
func (s *Scenario) Validate() error {
	if n := len(s.Regions); n < 1 || n > 16 {
		return fmt.Errorf("%d regions: 1 to 16", n)
	}
	if err := s.Engine.Validate(); err != nil {
		return err
	}
	if !(s.WarmS >= 0) || !(s.MeasureS > 0) || s.WarmS+s.MeasureS > 24*3600 {
		return fmt.Errorf("warm_s %g and measure_s %g: from 0, above 0, and together at most a day", s.WarmS, s.MeasureS)
	}
	if !(s.ProbeMs >= 10) || !(s.ScrapeMs >= 10) {
		return fmt.Errorf("probe_ms %g, scrape_ms %g: at least 10", s.ProbeMs, s.ScrapeMs)
	}
	if len(s.RTTMs) != len(s.Regions) {
		return fmt.Errorf("rtt_ms has %d rows; want one for each of %d regions", len(s.RTTMs), len(s.Regions))
	}
	total := 0
	for i, row := range s.RTTMs {
		if len(row) != len(s.Regions) {
			return fmt.Errorf("rtt_ms[%d] has %d numbers; want one for each of %d regions", i, len(row), len(s.Regions))
		}
		for k, v := range row {
			if !(v >= 0.1 && v < 1e5) {
				return fmt.Errorf("rtt_ms[%d][%d] is %g; want 0.1 to 100000", i, k, v)
			}
			if v != s.RTTMs[k][i] {
				return fmt.Errorf("rtt_ms[%d][%d] is %g, but rtt_ms[%d][%d] is %g: a round trip has one length", i, k, v, k, i, s.RTTMs[k][i])
			}
		}
	}
	for i := range s.Regions {
		r := &s.Regions[i]
		if r.Replicas < 0 || r.Replicas > 64 {
			return fmt.Errorf("region %s: %d replicas; want 0 to 64", r.Name, r.Replicas)
		}
		total += r.Replicas
		if err := r.Load.validate(); err != nil {
			return fmt.Errorf("region %s: %w", r.Name, err)
		}
	}
	if total == 0 {
		return errors.New("no region has a replica")
	}
	for i, f := range s.Faults {
		if f.Region < 0 || f.Region >= len(s.Regions) || f.Kind == Partition && (f.Other < 0 || f.Other >= len(s.Regions) || f.Other == f.Region) {
			return fmt.Errorf("faults[%d]: a %s needs regions that there are, and two for a partition", i, f.Kind)
		}
		if !(f.AtS >= 0) || !(f.ForS > 0) {
			return fmt.Errorf("faults[%d]: at_s %g, for_s %g: from 0, and above 0", i, f.AtS, f.ForS)
		}
	}
	return nil
}

func (l *Load) validate() error {
	switch {
	case l.Clients < 0 || l.Clients > 10_000:
		return fmt.Errorf("clients %d: 0 to 10000", l.Clients)
	case !(l.Output >= 1 && l.Output <= mostOutput):
		return fmt.Errorf("output %g: a median from 1 to %d", l.Output, mostOutput)
	case l.Kind == conversation && !(l.Turns >= 1 && l.Turns <= mostTurns):
		return fmt.Errorf("turns %g: a mean from 1 to %d", l.Turns, mostTurns)
	case l.Kind == conversation && !(l.Prompt >= 1 && l.Prompt <= mostPrompt/4):
		return fmt.Errorf("prompt %g: a median from 1 to %d", l.Prompt, mostPrompt/4)
	case l.Kind == treeOfThoughts && (l.Branches < 1 || l.Branches > 8 || l.Depth < 1 || l.Depth > 6):
		return fmt.Errorf("branches %d, depth %d: 1 to 8, and 1 to 6", l.Branches, l.Depth)
	case !(l.ThinkMs >= 0 && l.ThinkMs < 1e7):
		return fmt.Errorf("think_ms %g: from 0", l.ThinkMs)
	case !(l.Peak >= 0 && l.Peak <= 1e6):
		return fmt.Errorf("peak %g: peak over trough", l.Peak)
	case !(l.Phase >= 0 && l.Phase <= 1):
		return fmt.Errorf("phase %g: 0 to 1", l.Phase)
	}
	return nil
}

// file is what --scenario reads: YAML, or JSON, which is YAML too. What it
// leaves out is as in the scenario it is based on.
type file struct {
	Like     string       `yaml:"like"`
	Preset   string       `yaml:"preset"`
	Regions  []regionFile `yaml:"regions"`
	RTTMs    [][]float64  `yaml:"rtt_ms"`
	Engine   engineFile   `yaml:"engine"`
	WarmS    *float64     `yaml:"warm_s"`
	MeasureS *float64     `yaml:"measure_s"`
	ProbeMs  *float64     `yaml:"probe_ms"`
	ScrapeMs *float64     `yaml:"scrape_ms"`
	USDPerGB *float64     `yaml:"usd_per_gb"`
	Faults   []faultFile  `yaml:"faults"`
}

type engineFile struct {
	TPMs     *float64 `yaml:"tp_ms"`
	T0Ms     *float64 `yaml:"t0_ms"`
	BusyMs   *float64 `yaml:"busy_ms"`
	StepMs   *float64 `yaml:"step_ms"`
	StepPer  *float64 `yaml:"step_per_request_ms"`
	KVTokens *int     `yaml:"kv_tokens"`
	OnePass  *bool    `yaml:"one_pass"`
	Pends    *bool    `yaml:"pending_in_prefill"`
	LogSteps *int     `yaml:"log_steps"`
}

type regionFile struct {
	Name     string   `yaml:"name"`
	Replicas *int     `yaml:"replicas"`
	Workload string   `yaml:"workload"`
	Clients  *int     `yaml:"clients"`
	ThinkMs  *float64 `yaml:"think_ms"`
	Turns    *float64 `yaml:"turns"`
	Prompt   *float64 `yaml:"prompt"`
	Output   *float64 `yaml:"output"`
	Branches *int     `yaml:"branches"`
	Depth    *int     `yaml:"depth"`
	Peak     *float64 `yaml:"peak"`
	Phase    *float64 `yaml:"phase"`
}

type faultFile struct {
	Kind   string   `yaml:"kind"`
	Region string   `yaml:"region"`
	From   string   `yaml:"from"`
	AtS    *float64 `yaml:"at_s"`
	ForS   *float64 `yaml:"for_s"`
}

// Read returns the scenario of a name or of a file. A preset, unless it is
// empty, goes before the file's.
func Read(nameOrPath, preset string) (*Scenario, error) {
	if slices.Contains(Names(), nameOrPath) {
		if preset == "" {
			preset = "l4-llama8b"
		}
		return Named(nameOrPath, preset)
	}
	text, err := os.ReadFile(nameOrPath)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("scenario %q: there are %s, and no such file", nameOrPath, strings.Join(Names(), ", "))
	}
	if err != nil {
		return nil, fmt.Errorf("scenario: %w", err)
	}
	s, err := ParseScenario(text, preset)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nameOrPath, err)
	}
	return s, nil
}

// ParseScenario reads a scenario from YAML or JSON. Keys it does not know are
// refused, with line and column.
func ParseScenario(text []byte, preset string) (s *Scenario, err error) {
	defer func() { // goccy/go-yaml 1.19.2 panics on some input
		if r := recover(); r != nil {
			s, err = nil, fmt.Errorf("not readable as YAML (%v)", r)
		}
	}()
	var in file
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(&in); err != nil {
		return nil, fmt.Errorf("not a scenario: %s", strings.TrimSpace(yaml.FormatError(err, false, true)))
	}
	if preset == "" {
		if preset = in.Preset; preset == "" {
			preset = "l4-llama8b"
		}
	}
	if in.Like == "" {
		in.Like = "multi-turn"
	}
	if s, err = Named(in.Like, preset); err != nil {
		return nil, err
	}
	s.Name = "file"
	if err := in.into(s); err != nil {
		return nil, err
	}
	return s, s.Validate()
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}

func (in *file) into(s *Scenario) error {
	set(&s.Engine.TPMs, in.Engine.TPMs)
	set(&s.Engine.T0Ms, in.Engine.T0Ms)
	set(&s.Engine.BusyMs, in.Engine.BusyMs)
	set(&s.Engine.StepMs, in.Engine.StepMs)
	set(&s.Engine.StepPer, in.Engine.StepPer)
	set(&s.Engine.KVTokens, in.Engine.KVTokens)
	set(&s.Engine.OnePass, in.Engine.OnePass)
	set(&s.Engine.PrefillPends, in.Engine.Pends)
	set(&s.Engine.LogSteps, in.Engine.LogSteps)
	set(&s.WarmS, in.WarmS)
	set(&s.MeasureS, in.MeasureS)
	set(&s.ProbeMs, in.ProbeMs)
	set(&s.ScrapeMs, in.ScrapeMs)
	set(&s.USDPerGB, in.USDPerGB)
	if in.RTTMs != nil {
		s.RTTMs = in.RTTMs
	}
	if in.Regions != nil {
		like := s.Regions
		s.Regions = nil
		for i := range in.Regions {
			r, err := in.Regions[i].region(like[min(i, len(like)-1)], i)
			if err != nil {
				return err
			}
			if s.region(r.Name) >= 0 {
				return fmt.Errorf("regions[%d]: there are two %q", i, r.Name)
			}
			s.Regions = append(s.Regions, r)
		}
	}
	for i := range in.Faults {
		f, err := in.Faults[i].fault(s)
		if err != nil {
			return fmt.Errorf("faults[%d]: %w", i, err)
		}
		s.Faults = append(s.Faults, f)
	}
	return nil
}

func (s *Scenario) region(name string) int {
	return slices.IndexFunc(s.Regions, func(r Region) bool { return r.Name == name })
}

func (f *regionFile) region(like Region, i int) (Region, error) {
	r := like
	if f.Name != "" {
		r.Name = f.Name
	}
	set(&r.Replicas, f.Replicas)
	if f.Workload != "" {
		at := slices.Index(kindWords, f.Workload)
		if at < 0 {
			return r, fmt.Errorf("regions[%d]: workload %q; there are %s", i, f.Workload, strings.Join(kindWords, ", "))
		}
		if r.Load.Kind = Kind(at); r.Load.Kind == treeOfThoughts && r.Load.Branches == 0 {
			r.Load.Branches, r.Load.Depth, r.Load.Output = 2, 4, 100
		} else if r.Load.Kind == conversation && r.Load.Turns == 0 {
			r.Load.Turns, r.Load.Prompt, r.Load.Output = 5, said, answered
		}
	}
	set(&r.Load.Clients, f.Clients)
	set(&r.Load.ThinkMs, f.ThinkMs)
	set(&r.Load.Turns, f.Turns)
	set(&r.Load.Prompt, f.Prompt)
	set(&r.Load.Output, f.Output)
	set(&r.Load.Branches, f.Branches)
	set(&r.Load.Depth, f.Depth)
	set(&r.Load.Peak, f.Peak)
	set(&r.Load.Phase, f.Phase)
	return r, nil
}

func (f *faultFile) fault(s *Scenario) (Fault, error) {
	at := slices.Index(faultWords, f.Kind)
	if at < 0 {
		return Fault{}, fmt.Errorf("kind %q; there are %s", f.Kind, strings.Join(faultWords, ", "))
	}
	out := Fault{Kind: FaultKind(at), Region: s.region(f.Region), Other: s.region(f.From), AtS: s.WarmS, ForS: s.MeasureS / 2}
	if out.Region < 0 {
		return out, fmt.Errorf("region %q: no such region", f.Region)
	}
	if out.Kind == Partition && out.Other < 0 {
		return out, fmt.Errorf("from %q: no such region", f.From)
	}
	set(&out.AtS, f.AtS)
	set(&out.ForS, f.ForS)
	return out, nil
}
