package decode

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
)

// scenarioFile is what --scenario reads: YAML, or JSON, which is YAML too.
type scenarioFile struct {
	Groups []groupFile `yaml:"groups"`
}

type groupFile struct {
	Name  string     `yaml:"name"`
	C0Ms  *float64   `yaml:"c0_ms"`
	C1Ms  *float64   `yaml:"c1_ms"`
	Each  *float64   `yaml:"request_ms"`
	Ranks []rankFile `yaml:"ranks"`
}

type rankFile struct {
	Count    *int          `yaml:"count"` // so many equal ones; 1
	Slots    *int          `yaml:"slots"`
	Capacity *int64        `yaml:"capacity"` // KV tokens, 0 = unlimited
	Cost     *float64      `yaml:"cost"`
	Keeps    time.Duration `yaml:"keeps"` // the KV of answers; 0s = not
	Joins    string        `yaml:"joins"`
	Leaves   string        `yaml:"leaves"`
	Fails    string        `yaml:"fails"`
}

// ReadScenario reads a fleet from a file. What it leaves out is as in the one
// group and its first rank that like has.
func ReadScenario(path string, like Fleet) (Fleet, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return Fleet{}, fmt.Errorf("scenario: %w", err)
	}
	f, err := ParseScenario(text, like)
	if err != nil {
		return Fleet{}, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}

// ParseScenario reads a fleet from YAML or JSON. Keys it does not know are
// refused.
func ParseScenario(text []byte, like Fleet) (f Fleet, err error) {
	defer func() { // goccy/go-yaml 1.19.2 panics on some input
		if r := recover(); r != nil {
			f, err = Fleet{}, fmt.Errorf("not readable as YAML (%v)", r)
		}
	}()
	var in scenarioFile
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(&in); err != nil {
		return Fleet{}, fmt.Errorf("not a scenario: %s", strings.TrimSpace(yaml.FormatError(err, false, true)))
	}
	group := &like.Groups[0]
	for i, g := range in.Groups {
		out := Group{Name: cmp.Or(g.Name, "group "+strconv.Itoa(i)), C0Ms: or(g.C0Ms, group.C0Ms), C1Ms: or(g.C1Ms, group.C1Ms),
			RequestMs: or(g.Each, group.RequestMs)}
		for k, r := range g.Ranks {
			rank, err := r.rank(&group.Ranks[0])
			if err != nil {
				return Fleet{}, fmt.Errorf("group %q, ranks[%d]: %w", out.Name, k, err)
			}
			n := or(r.Count, 1)
			if n < 1 || n > mostRanks {
				return Fleet{}, fmt.Errorf("group %q, ranks[%d]: count %d; want 1 to %d", out.Name, k, n, mostRanks)
			}
			for range n {
				out.Ranks = append(out.Ranks, rank)
			}
		}
		f.Groups = append(f.Groups, out)
	}
	return f, f.Validate()
}

func or[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

func (r *rankFile) rank(like *Rank) (Rank, error) {
	out := Rank{Slots: or(r.Slots, like.Slots), Capacity: or(r.Capacity, like.Capacity), Cost: or(r.Cost, like.Cost), Keeps: r.Keeps,
		Fails: r.Fails != ""}
	if r.Leaves != "" && r.Fails != "" {
		return Rank{}, errors.New("it leaves and fails: keep one")
	}
	for _, m := range []struct {
		key, text string
		to        *Moment
	}{{"joins", r.Joins, &out.Join}, {"leaves", r.Leaves, &out.Leave}, {"fails", r.Fails, &out.Leave}} {
		if m.text == "" {
			continue
		}
		var err error
		if *m.to, err = parseMoment(m.text); err != nil {
			return Rank{}, fmt.Errorf("%s: %w", m.key, err)
		}
	}
	return out, nil
}

// parseMoment reads "step 500" or a time like "90s" since the start.
func parseMoment(text string) (Moment, error) {
	if number, ok := strings.CutPrefix(text, "step "); ok {
		n, err := strconv.ParseInt(strings.TrimSpace(number), 10, 64)
		if err == nil && n > 0 && n < math.MaxInt32 {
			return Moment{Step: n}, nil
		}
	} else if d, err := time.ParseDuration(text); err == nil && d > 0 {
		return Moment{Ms: d.Seconds() * 1000}, nil
	}
	return Moment{}, fmt.Errorf("%q; want a step of the group, like \"step 500\", or a time since the start, like \"90s\"", text)
}
