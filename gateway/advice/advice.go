package advice

import (
	"fmt"
	"strings"
	"time"
)

// Kinds of steps.
const (
	AddPrefill    = "add_prefill"
	AddDecode     = "add_decode"
	RemovePrefill = "remove_prefill"
	RemoveDecode  = "remove_decode"
	Rebalance     = "rebalance" // one side is short while the other has ranks to spare
	None          = "none"
)

// Reasons for steps.
const (
	ReasonBacklog       = "backlog"           // add_prefill: prompts wait
	ReasonPoolWait      = "pool_wait"         // add_decode: hand-offs wait
	ReasonBusy          = "busy"              // add_*: nothing waits yet, but no rank is free
	ReasonKV            = "kv"                // add_*: the KV budget is used up
	ReasonIdle          = "idle"              // remove_*
	ReasonToPrefill     = "decode_to_prefill" // rebalance
	ReasonToDecode      = "prefill_to_decode" // rebalance
	ReasonBalanced      = "balanced"          // none
	ReasonTooLittleData = "too_little_data"   // none
	ReasonPrefillDown   = "prefill_down"      // none: no rank answers, and more ranks would not help
	ReasonDecodeDown    = "decode_down"
	// none: the ranks that answer are enough now, but it is not known whether they were enough before the others went down
	ReasonRanksDown = "ranks_down"
)

// Step is one advised action.
type Step struct {
	Kind   string `json:"kind"`
	Reason string `json:"reason"`
}

// Steps lists every step that can be advised.
func Steps() []Step {
	return []Step{
		{AddPrefill, ReasonBacklog}, {AddPrefill, ReasonBusy}, {AddPrefill, ReasonKV},
		{AddDecode, ReasonPoolWait}, {AddDecode, ReasonBusy}, {AddDecode, ReasonKV},
		{RemovePrefill, ReasonIdle}, {RemoveDecode, ReasonIdle},
		{Rebalance, ReasonToPrefill}, {Rebalance, ReasonToDecode},
		{None, ReasonBalanced}, {None, ReasonTooLittleData}, {None, ReasonPrefillDown}, {None, ReasonDecodeDown}, {None, ReasonRanksDown},
	}
}

// Side has the measured values of prefill or decode, as means over the window, and the advised number of ranks.
type Side struct {
	Live           int     `json:"live_ranks"` // now
	Down           int     `json:"down_ranks"` // now; they do not answer
	Advised        int     `json:"advised_ranks"`
	BacklogSeconds float64 `json:"backlog_seconds"` // time until a request that arrives now would begin
	Busy           float64 `json:"busy_share"`      // share of prefill time, or of decode slots
	KV             float64 `json:"kv_share"`        // share of the KV budget; 0: unknown
}

// Advice tells what to do about a model's ranks.
type Advice struct {
	Model   string  `json:"model"`
	Steps   []Step  `json:"steps"` // at least one
	Says    string  `json:"says"`
	Ratio   float64 `json:"pd_ratio"` // advised prefill ranks for each decode rank; 0: not known yet
	Prefill Side    `json:"prefill"`
	Decode  Side    `json:"decode"`
}

// Settings of an Advisor.
type Settings struct {
	Window time.Duration // all values are means over it; a shorter need is ignored
	Calm   time.Duration // a rank is spare if nothing needed it for so long
	Target float64       // share of the capacity of the ranks that should be used
}

// band keeps the advice from flapping: more ranks are advised once the need exceeds the ranks by this factor, and until the need no longer
// exceeds the ranks at all.
const band = 1.1

// Advisor follows one model. It is not safe for concurrent use.
type Advisor struct {
	set     Settings
	since   time.Time // of the first sample after a side was down
	lost    time.Time // of the last sample in which a rank was down
	samples []Sample  // of the window, oldest first
	needs   []need    // means over the window, kept for Settings.Calm
	short   struct{ prefill, decode bool }
}

// New returns an Advisor that has seen nothing.
func New(set Settings) *Advisor { return &Advisor{set: set} }

// Observe adds a sample, which must be newer than all before, and returns the advice.
func (a *Advisor) Observe(s Sample) Advice {
	if s.Prefill.Down+s.Decode.Down > 0 {
		a.lost = s.At
	}
	if s.Prefill.Live == 0 || s.Decode.Live == 0 {
		return a.down(s)
	}
	if len(a.samples) == 0 {
		a.since = s.At
	}
	a.samples = append(keepAfter(a.samples, s.At.Add(-a.set.Window), func(s Sample) time.Time { return s.At }), s)
	out := a.seen()
	if s.At.Sub(a.since) < a.set.Window {
		out.Steps = []Step{{None, ReasonTooLittleData}}
		out.Says = fmt.Sprintf("How many ranks are needed is not known yet: both sides have been watched for less than %g s.",
			a.set.Window.Seconds())
		return out
	}
	a.needs = append(keepAfter(a.needs, s.At.Add(-a.set.Calm), func(n need) time.Time { return n.at }), a.mean())
	a.advise(&out)
	return out
}

// down returns the advice while prefill or decode does not answer at all. The needs from before are kept for later; the window begins anew.
func (a *Advisor) down(s Sample) Advice {
	a.samples = append(a.samples[:0], s)
	out := a.seen()
	a.samples = a.samples[:0]
	step := Step{None, ReasonPrefillDown}
	out.Says = "How many ranks are needed is not known while no prefill rank answers; see /workers."
	if s.Prefill.Live > 0 {
		step.Reason, out.Says = ReasonDecodeDown, "How many ranks are needed is not known while no decode rank answers; see /workers."
	}
	out.Steps = []Step{step}
	if most := a.most(s.At.Add(-a.set.Calm)); most.at != (time.Time{}) {
		out.Prefill.Advised, out.Decode.Advised = max(s.Prefill.Live, ranks(most.prefill)), max(s.Decode.Live, ranks(most.decode))
		out.Ratio = float64(out.Prefill.Advised) / float64(out.Decode.Advised)
	}
	return out
}

// seen returns the means over the window, and advises as many ranks as there are.
func (a *Advisor) seen() Advice {
	var out Advice
	now := &a.samples[len(a.samples)-1]
	out.Prefill = Side{Live: now.Prefill.Live, Down: now.Prefill.Down, Advised: now.Prefill.Live}
	out.Decode = Side{Live: now.Decode.Live, Down: now.Decode.Down, Advised: now.Decode.Live}
	n := float64(len(a.samples))
	for i := range a.samples {
		p, d := &a.samples[i].Prefill, &a.samples[i].Decode
		out.Prefill.Busy += share(p.Busy, p.Live) / n
		out.Prefill.KV += kvShare(p.KVTokens, p.Capacity) / n
		out.Decode.Busy += share(d.Used, d.Slots) / n
		out.Decode.KV += kvShare(d.KVTokens, d.Capacity) / n
	}
	if now.Prefill.Live > 0 {
		out.Prefill.BacklogSeconds = (now.Prefill.Waiting + now.Prefill.Begun) / float64(now.Prefill.Live)
	}
	out.Decode.BacklogSeconds = a.poolWait()
	if now.Decode.Live > 0 && now.Prefill.Live > 0 {
		out.Ratio = float64(now.Prefill.Live) / float64(now.Decode.Live)
	}
	return out
}

// endRate returns how many answers end per second.
func (a *Advisor) endRate() float64 {
	first, last := &a.samples[0], &a.samples[len(a.samples)-1]
	passed := last.At.Sub(first.At).Seconds()
	if passed <= 0 || last.Decode.Ended < first.Decode.Ended {
		return 0
	}
	return float64(last.Decode.Ended-first.Decode.Ended) / passed
}

// poolWait returns how long a hand-off that arrives now waits for a slot, in seconds. The hand-offs before it get slots as answers end.
func (a *Advisor) poolWait() float64 {
	d := &a.samples[len(a.samples)-1].Decode
	if d.Pool == 0 {
		return 0
	}
	if rate := a.endRate(); rate > 0 {
		return float64(d.Pool) / rate
	}
	return d.Oldest.Seconds()
}

// serves returns how long an answer keeps its slot, in seconds, by Little's law.
func (a *Advisor) serves() float64 {
	used := 0.0
	for i := range a.samples {
		used += float64(a.samples[i].Decode.Used) / float64(len(a.samples))
	}
	if rate := a.endRate(); rate > 0 {
		return used / rate
	}
	return drain.Seconds()
}

// mean returns the mean need of the samples in the window.
func (a *Advisor) mean() need {
	m := need{at: a.samples[len(a.samples)-1].At}
	serves, n := a.serves(), float64(len(a.samples))
	for i := range a.samples {
		one := needOf(&a.samples[i], a.set.Target, serves)
		m.prefill += one.prefill / n
		m.decode += one.decode / n
		m.prefillThen += one.prefillThen / n
		m.decodeThen += one.decodeThen / n
	}
	return m
}

// most returns the largest need of each side since a time. If m.at is zero, there was none.
func (a *Advisor) most(since time.Time) (m need) {
	for _, n := range a.needs {
		if n.at.Before(since) {
			continue
		}
		m.at = n.at
		m.prefill, m.decode = max(m.prefill, n.prefill), max(m.decode, n.decode)
		m.prefillThen, m.decodeThen = max(m.prefillThen, n.prefillThen), max(m.decodeThen, n.decodeThen)
	}
	return m
}

// advise compares the needed ranks with the live ones.
func (a *Advisor) advise(out *Advice) {
	now := a.needs[len(a.needs)-1]
	lately, calm := a.most(now.at.Add(-a.set.Window)), a.most(now.at.Add(-a.set.Calm))
	a.short.prefill = isShort(a.short.prefill, now.prefill, out.Prefill.Live)
	a.short.decode = isShort(a.short.decode, now.decode, out.Decode.Live)
	lost := out.Prefill.Down + out.Decode.Down
	watched := a.set.Window + a.set.Calm
	// ranks that are down also keep work from the others, so no rank counts as spare then
	whole := now.at.Sub(a.since) >= watched && now.at.Sub(a.lost) >= watched
	sparePrefill := whole && !a.short.prefill && ranks(calm.prefillThen) < out.Prefill.Live
	spareDecode := whole && !a.short.decode && ranks(calm.decodeThen) < out.Decode.Live
	if a.short.prefill {
		out.Prefill.Advised = max(out.Prefill.Live+1, ranks(lately.prefill))
	}
	if a.short.decode {
		out.Decode.Advised = max(out.Decode.Live+1, ranks(lately.decode))
	}
	if sparePrefill {
		out.Prefill.Advised = ranks(calm.prefillThen)
	}
	if spareDecode {
		out.Decode.Advised = ranks(calm.decodeThen)
	}
	out.Ratio = float64(out.Prefill.Advised) / float64(out.Decode.Advised)
	switch {
	case a.short.prefill && spareDecode:
		out.Steps = []Step{{Rebalance, ReasonToPrefill}}
	case a.short.decode && sparePrefill:
		out.Steps = []Step{{Rebalance, ReasonToDecode}}
	default:
		if a.short.prefill {
			out.Steps = append(out.Steps, Step{AddPrefill, a.whyPrefill(out)})
		}
		if a.short.decode {
			out.Steps = append(out.Steps, Step{AddDecode, a.whyDecode(out)})
		}
		if sparePrefill {
			out.Steps = append(out.Steps, Step{RemovePrefill, ReasonIdle})
		}
		if spareDecode {
			out.Steps = append(out.Steps, Step{RemoveDecode, ReasonIdle})
		}
	}
	out.Says = fmt.Sprintf("Prefill has %s, and %s advised. Decode has %s, and %s advised.", count(out.Prefill.Live), are(out.Prefill.Advised),
		count(out.Decode.Live), are(out.Decode.Advised))
	switch {
	case lost > 0 && len(out.Steps) == 0:
		out.Steps = []Step{{None, ReasonRanksDown}}
		out.Says = down(out) + " Those that answer are enough for what comes now. Whether there are enough ranks for what came before is not " +
			"known until all answer."
	case lost > 0:
		them := "them"
		if lost == 1 {
			them = "it"
		}
		out.Says += " " + down(out) + " Mend " + them + " first: how many more are needed then is not known."
	case len(out.Steps) == 0:
		out.Steps = []Step{{None, ReasonBalanced}}
	}
}

// down says which ranks do not answer.
func down(out *Advice) string {
	var parts []string
	for _, s := range []struct {
		name string
		side Side
	}{{"prefill", out.Prefill}, {"decode", out.Decode}} {
		if s.side.Down > 0 {
			parts = append(parts, fmt.Sprintf("%d of %d %s ranks", s.side.Down, s.side.Down+s.side.Live, s.name))
		}
	}
	is := "do"
	if out.Prefill.Down+out.Decode.Down == 1 {
		is = "does"
	}
	return strings.Join(parts, " and ") + " " + is + " not answer."
}

func count(ranks int) string {
	if ranks == 1 {
		return "1 rank"
	}
	return fmt.Sprintf("%d ranks", ranks)
}

// are returns "1 is" or "N are", for a sentence that goes on with "advised".
func are(ranks int) string {
	if ranks == 1 {
		return "1 is"
	}
	return fmt.Sprintf("%d are", ranks)
}

func isShort(was bool, need float64, live int) bool {
	if was {
		return need > float64(live)
	}
	return need > band*float64(live)
}

// whyPrefill returns the reason for more prefill ranks. Waiting prompts are a stronger reason than busy engines.
func (a *Advisor) whyPrefill(out *Advice) string {
	waiting := 0.0
	for i := range a.samples {
		waiting += a.samples[i].Prefill.Waiting / float64(len(a.samples)*out.Prefill.Live)
	}
	switch {
	case waiting >= 1: // seconds of waiting work per rank
		return ReasonBacklog
	case out.Prefill.KV > out.Prefill.Busy:
		return ReasonKV
	}
	return ReasonBusy
}

func (a *Advisor) whyDecode(out *Advice) string {
	pooled := 0
	for i := range a.samples {
		pooled += a.samples[i].Decode.Pool
	}
	switch {
	case out.Decode.KV > out.Decode.Busy:
		return ReasonKV
	case pooled >= len(a.samples): // on average at least one hand-off waits
		return ReasonPoolWait
	}
	return ReasonBusy
}

// keepAfter drops from the front of the list everything older than from.
func keepAfter[T any](list []T, from time.Time, at func(T) time.Time) []T {
	i := 0
	for i < len(list) && at(list[i]).Before(from) {
		i++
	}
	return append(list[:0], list[i:]...)
}
