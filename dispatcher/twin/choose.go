package twin

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"evenkeel/dispatcher/board"
)

// autoPrefix begins a policy that is a choice among others.
const autoPrefix = "auto:"

// Auto are the policies that a spec like auto:br0,evenkeel:kappa=0 lets the twin choose from; the first is in force
// until it has. ok is false for any other spec. A key that follows a comma belongs to the policy before.
func Auto(spec string) (specs []string, ok bool) {
	list, ok := strings.CutPrefix(spec, autoPrefix)
	if !ok {
		return nil, false
	}
	for _, part := range strings.Split(list, ",") {
		name, _, keyed := strings.Cut(part, "=")
		if keyed && !strings.Contains(name, ":") && len(specs) > 0 {
			specs[len(specs)-1] += "," + part
			continue
		}
		specs = append(specs, strings.TrimSpace(part))
	}
	return specs, true
}

// When another policy is chosen: its gain was above the twin's error in so many verdicts one after the other,
// and the last change was so long ago.
const (
	chooseAfter = 3
	chooseEvery = 5 * time.Minute
)

// Chooser puts the policy in force that owes the least work, as the twin finds: it serves the same requests soonest.
// Shorter steps alone are no gain where they are made of emptier ranks.
type Chooser struct {
	specs  []string // to choose from
	latest map[board.GroupKey]Verdict
	best   string // of the last verdicts, as a spec
	row    int    // how often one after the other
	last   time.Time
}

// Choice is a change of the policy.
type Choice struct {
	Spec string // to be put in force
	Why  string
}

// NewChooser chooses among these policies.
func NewChooser(specs []string) *Chooser {
	return &Chooser{specs: specs, latest: map[board.GroupKey]Verdict{}}
}

// Consider adds verdicts, and returns which policy is to be put in force, if another is.
func (c *Chooser) Consider(fresh []Verdict, now time.Time) (choice Choice, change bool) {
	if len(fresh) == 0 {
		return Choice{}, false
	}
	for _, v := range fresh {
		c.latest[v.Group] = v
	}
	best, gain, bound := "", 0.0, 0.0
	for _, a := range fresh[0].Against {
		if !slices.Contains(c.specs, a.Spec) {
			continue // it is only compared
		}
		if g, b := c.gain(a.Spec, fresh[0].Policy, now); g > b && g > gain {
			best, gain, bound = a.Spec, g, b
		}
	}
	if best != c.best {
		c.best, c.row = best, 0
	}
	if best == "" {
		return Choice{}, false
	}
	if c.row++; c.row < chooseAfter || now.Sub(c.last) < chooseEvery {
		return Choice{}, false
	}
	c.last, c.best, c.row = now, "", 0
	clear(c.latest)
	return Choice{Spec: best, Why: fmt.Sprintf(
		"%.1f %% less work is owed to requests under %s than under %s, and the twin is wrong by %.1f %%, in %d verdicts one after the other", 100*gain, best, fresh[0].Policy, 100*bound, chooseAfter)}, true
}

// gain is by what share less work is owed under another policy, over all groups, and by what share the twin may be
// wrong. One that is not known for every group gains nothing.
func (c *Chooser) gain(spec, inForce string, now time.Time) (gain, bound float64) {
	all := 0.0
	for key, v := range c.latest {
		if now.Sub(v.To) > Stale || v.Policy != inForce {
			delete(c.latest, key) // the group is gone
			continue
		}
		if !v.Sure {
			return 0, 0
		}
		other := math.Inf(1)
		for _, a := range v.Against {
			if a.Spec == spec && a.Failed == nil {
				other = a.Owed
			}
		}
		gain += v.TwinOwed - other
		bound += v.OwedError * v.Owed
		all += v.TwinOwed
	}
	if all == 0 {
		return 0, 0
	}
	return gain / all, bound / all
}
