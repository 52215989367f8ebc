package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"evenkeel/bench/lab/trace"
)

// refuseUselessFlags refuses flags that the user has given although they would have no effect:
// flags of another tier, flags that another flag replaces, and flags that need another flag.
func (c *simulateCmd) refuseUselessFlags(k *kong.Context) error {
	given := given(k)
	if err := c.refuseForeign(given); err != nil {
		return err
	}
	return c.refuseReplaced(given)
}

// refuseForeign refuses flags of another tier than --tier. The tag tier of a flag lists its tiers.
// A flag without this tag belongs to all tiers.
func (c *simulateCmd) refuseForeign(given []*kong.Flag) error {
	var foreign, tiers []string
	for _, f := range given {
		ofTiers := f.Tag.Get("tier")
		if ofTiers != "" && !slices.Contains(strings.Split(ofTiers, ","), c.Tier) {
			foreign = append(foreign, "--"+f.Name)
			tiers = append(tiers, strings.Split(ofTiers, ",")...)
		}
	}
	if len(foreign) == 0 {
		return nil
	}
	slices.Sort(tiers)
	tiers = slices.Compact(tiers) // the tiers that have any of the foreign flags, each once
	last := len(tiers) - 1
	tierList := tiers[last]
	if last > 0 {
		tierList = strings.Join(tiers[:last], ", ") + " and " + tierList
	}
	return usageError{fmt.Errorf("%s: --tier %s has no such flag, only --tier %s; leave it out, or choose another tier",
		strings.Join(foreign, ", "), c.Tier, tierList)}
}

// refuseReplaced refuses flags that another given flag replaces, and flags that need a flag which
// was not given.
func (c *simulateCmd) refuseReplaced(given []*kong.Flag) error {
	replays := []string{"policies", "out", "json"}
	for _, f := range given {
		isOfReplay := slices.Contains(replays, f.Name) || f.Name == "log" || f.Name == "tier"
		if c.Log != "" && !isOfReplay {
			return usageError{fmt.Errorf("--%s has no effect with --log, because the log has it; a replay takes --%s", f.Name,
				strings.Join(replays, ", --"))}
		}
		switch {
		case f.Name == "workers" && c.Scenario != "":
			return usageError{fmt.Errorf("--workers does not go with --scenario, which says how many ranks there are; leave one out")}
		case slices.Contains([]string{"workers", "c0", "c1", "scenario"}, f.Name) && c.Law != "":
			return usageError{fmt.Errorf("--%s does not go with --law, which says how many ranks there are and how long they step; leave one out",
				f.Name)}
		case f.Name == "ahead" && c.Bind != bindArrival:
			return usageError{fmt.Errorf("--ahead needs --bind arrival; with --bind late, policies fill slots ahead by themselves")}
		case f.Name == "spare" && c.Bind == bindArrival:
			return usageError{fmt.Errorf("--spare does not go with --bind arrival, where the rank is chosen before the prefill and pulls nothing; " +
				"leave one out")}
		case f.Name == "format" && (c.Trace == "" || strings.HasPrefix(c.Trace, trace.SynthPrefix)):
			return usageError{fmt.Errorf("--format needs --trace FILE, because it is the format of that file")}
		case c.Tier == "prefill" && !c.Prefill.Both && slices.Contains([]string{"c0", "c1", "chunk"}, f.Name):
			return usageError{fmt.Errorf("--%s needs --both with --tier prefill, because engines decode only then", f.Name)}
		case c.Tier == "prefill" && c.Prefill.Both && f.Name == "hold":
			return usageError{fmt.Errorf("--hold does not go with --both, where engines decode their own prompts and no rank fetches KV; leave " +
				"one out")}
		}
	}
	return nil
}

// given returns the flags that the user has given on the command line, each once.
func given(k *kong.Context) (flags []*kong.Flag) {
	for _, p := range k.Path {
		if p.Flag != nil && !slices.Contains(flags, p.Flag) {
			flags = append(flags, p.Flag)
		}
	}
	return flags
}

// namesOf returns the names of flags, without their dashes.
func namesOf(flags []*kong.Flag) (names []string) {
	for _, f := range flags {
		names = append(names, f.Name)
	}
	return names
}

// prefillFlags are the flags that only --tier prefill has.
type prefillFlags struct {
	Tp            float64           `tier:"prefill" default:"0.0938" placeholder:"MS" help:"A prefill takes this time per token that is not cached (default: ${default})."`
	T0            float64           `tier:"prefill" name:"t0" default:"150.72" placeholder:"MS" help:"A prefill takes this time, however short (default: ${default})."`
	Beta2         float64           `tier:"prefill" name:"beta2" placeholder:"MS" help:"A prefill takes this time per pair of tokens that attention looks at: N*(H+N/2) pairs for N new tokens behind H cached ones (default: 0)."`
	Learn         bool              `tier:"prefill" default:"true" negatable:"" help:"Let the tier learn from answers how long a prefill takes, as in the server. With --no-learn, it is told, and the table says so (default: yes)."`
	Hold          time.Duration     `tier:"prefill" default:"500ms" help:"A decode rank has fetched the KV this long after the end of a prefill (default: ${default})."`
	WrongCapacity float64           `tier:"prefill" default:"1" placeholder:"FACTOR" help:"Tell the tier this many times the engines' capacity (default: ${default})."`
	Slow          float64           `tier:"prefill" placeholder:"FACTOR" help:"The first engine takes this many times as long as the others, and the tier does not know it."`
	Push          int               `tier:"prefill" placeholder:"N" help:"Let an engine have this many unanswered probes (default: as in the config file)."`
	Both          bool              `tier:"prefill" help:"Let engines decode what they prefilled, too: in steps of --c0 and --c1 with a chunk of a prompt in front."`
	Chunk         int               `tier:"prefill" default:"2048" placeholder:"TOKENS" help:"A chunk has this many tokens (default: ${default})."`
	Burst         float64           `tier:"prefill" placeholder:"SHARE" help:"In the second third of the trace, this share of the requests belongs to one class: 0.6 is 60 %."`
	Hotspots      bool              `tier:"prefill" default:"true" negatable:"" help:"Keep hot classes off the engines that hold them (default: yes)."`
	Affinity      bool              `tier:"prefill" help:"Send each request of a session to the engine of the session's last request, while the load allows it."`
	Define        map[string]string `tier:"prefill" placeholder:"NAME=SCORE" help:"Add a policy of your own: an expression over indicators, where smaller is better. The flag may be repeated."`
}

// geoFlags are the flags that only --tier geo has.
type geoFlags struct {
	Preset string `tier:"geo" placeholder:"NAME" help:"Give the scenario these engines: ${geopresets} (default: those in the scenario's file, else l4-llama8b)."`
}
