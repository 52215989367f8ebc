package regions

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"evenkeel/internal/spelling"
)

// file is what --scenario reads: YAML, or JSON, which is YAML too. What it
// leaves out is as in the scenario it is based on.
type file struct {
	Like     string  `yaml:"like"`
	Preset   string  `yaml:"preset"`
	Regions  []later `yaml:"regions"` // regionFile
	Faults   []later `yaml:"faults"`  // faultFile
	Scenario `yaml:",inline"`
}

// later is a part of a file that is read once it is known what it is read on top of.
type later func(to any) error

// UnmarshalYAML keeps the part.
func (l *later) UnmarshalYAML(read func(to any) error) error {
	*l = read
	return nil
}

func (l later) onto(to any) error {
	if l == nil { // null
		return nil
	}
	if err := l(to); err != nil {
		return notScenario(err)
	}
	return nil
}

type regionFile struct {
	Workload string `yaml:"workload"`
	Region   `yaml:",inline"`
}

type faultFile struct {
	Kind   string  `yaml:"kind"`
	Region string  `yaml:"region"`
	From   string  `yaml:"from"`
	AtS    float64 `yaml:"at_s"`
	ForS   float64 `yaml:"for_s"`
}

const defaultPreset = "l4-llama8b"

// Read returns the scenario of a name or of a file. A preset, unless it is
// empty, goes before the file's.
func Read(nameOrPath, preset string) (*Scenario, error) {
	if slices.Contains(Names(), nameOrPath) {
		return Named(nameOrPath, cmp.Or(preset, defaultPreset))
	}
	text, err := os.ReadFile(nameOrPath)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("scenario %q%s: there are %s, and no such file", nameOrPath, spelling.Hint(nameOrPath, Names()),
			strings.Join(Names(), ", "))
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
	var base file
	if err := yaml.Unmarshal(text, &base); err != nil {
		return nil, notScenario(err)
	}
	like, err := Named(cmp.Or(base.Like, "multi-turn"), cmp.Or(preset, base.Preset, defaultPreset))
	if err != nil {
		return nil, err
	}
	in := file{Scenario: *like}
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(&in); err != nil {
		return nil, notScenario(err)
	}
	s = &in.Scenario
	if in.Regions != nil {
		s.Regions = nil
	}
	for i, part := range in.Regions {
		r, err := region(part, like.Regions[min(i, len(like.Regions)-1)])
		if err != nil {
			return nil, fmt.Errorf("regions[%d]: %w", i, err)
		}
		if s.region(r.Name) >= 0 {
			return nil, fmt.Errorf("regions[%d]: there are two %q", i, r.Name)
		}
		s.Regions = append(s.Regions, r)
	}
	for i, part := range in.Faults {
		f, err := s.fault(part)
		if err != nil {
			return nil, fmt.Errorf("faults[%d]: %w", i, err)
		}
		s.Faults = append(s.Faults, f)
	}
	return s, s.Validate()
}

func notScenario(err error) error {
	return fmt.Errorf("not a scenario: %s", strings.TrimSpace(yaml.FormatError(err, false, true)))
}

func (s *Scenario) region(name string) int {
	return slices.IndexFunc(s.Regions, func(r Region) bool { return r.Name == name })
}

// region reads a region on top of the one that it is like. Another workload than that
// one's has what is usual for it.
func region(part later, like Region) (Region, error) {
	f := regionFile{Region: like}
	if err := part.onto(&f); err != nil {
		return like, err
	}
	if f.Workload == "" {
		return f.Region, nil
	}
	at := slices.Index(kindWords, f.Workload)
	if at < 0 {
		return like, fmt.Errorf("workload %q; there are %s", f.Workload, strings.Join(kindWords, ", "))
	}
	if like.Load.Kind = Kind(at); like.Load.Kind == treeOfThoughts && like.Load.Branches == 0 {
		like.Load.Branches, like.Load.Depth, like.Load.Output = 2, 4, 100
	} else if like.Load.Kind == conversation && like.Load.Turns == 0 {
		like.Load.Turns, like.Load.Prompt, like.Load.Output = 5, said, answered
	}
	f.Region = like
	err := part.onto(&f) // once more, over what is usual
	return f.Region, err
}

// fault reads a fault, by default of half the measured part.
func (s *Scenario) fault(part later) (Fault, error) {
	f := faultFile{AtS: s.WarmS, ForS: s.MeasureS / 2}
	if err := part.onto(&f); err != nil {
		return Fault{}, err
	}
	at := slices.Index(faultWords, f.Kind)
	if at < 0 {
		return Fault{}, fmt.Errorf("kind %q; there are %s", f.Kind, strings.Join(faultWords, ", "))
	}
	out := Fault{Kind: FaultKind(at), Region: s.region(f.Region), Other: s.region(f.From), AtS: f.AtS, ForS: f.ForS}
	if out.Region < 0 {
		return out, fmt.Errorf("region %q: no such region", f.Region)
	}
	if out.Kind == Partition && out.Other < 0 {
		return out, fmt.Errorf("from %q: no such region", f.From)
	}
	return out, nil
}
