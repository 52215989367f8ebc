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

// Reasons of steps, with the kinds that may have them.
const (
	ReasonBacklog  = "backlog"   // add_prefill: prompts wait
	ReasonPoolWait = "pool_wait" // add_decode: hand-offs wait
	// add_prefill, add_decode: nothing waits yet, but the ranks are used beyond the target
	ReasonBusy = "busy"
	// add_prefill, add_decode: the KV budget is short, not time or slots
	ReasonKV = "kv"
	// remove_prefill, remove_decode: in the last calm period, fewer ranks were needed
	ReasonIdle = "idle"
	// rebalance: prefill is short, and decode has ranks to spare
	ReasonToPrefill = "decode_to_prefill"
	// rebalance: decode is short, and prefill has ranks to spare
	ReasonToDecode = "prefill_to_decode"
	ReasonBalanced = "balanced" // none: the ranks are enough, and no rank is to spare
	// none: both sides have been watched for less than a window
	ReasonTooLittleData = "too_little_data"
	// none: no prefill rank takes prompts, and more ranks would not help
	ReasonPrefillDown = "prefill_down"
	ReasonDecodeDown  = "decode_down" // none: no decode rank takes requests
	// none: the ranks that answer are enough now; whether there are too many is not known
	ReasonRanksDown = "ranks_down"
)

// Step is one advised change, with its reason.
type Step struct {
	Kind   string `json:"kind"`
	Reason string `json:"reason"`
}

// Steps lists every combination.
func Steps() []Step {
	return []Step{
		{AddPrefill, ReasonBacklog}, {AddPrefill, ReasonBusy}, {AddPrefill, ReasonKV},
		{AddDecode, ReasonPoolWait}, {AddDecode, ReasonBusy}, {AddDecode, ReasonKV},
		{RemovePrefill, ReasonIdle}, {RemoveDecode, ReasonIdle},
		{Rebalance, ReasonToPrefill}, {Rebalance, ReasonToDecode},
		{None, ReasonBalanced}, {None, ReasonTooLittleData}, {None, ReasonPrefillDown}, {None, ReasonDecodeDown}, {None, ReasonRanksDown},
	}
}

// Side has the measured values of the prefill or the decode side, as means over the window, and the
// advised number of ranks.
type Side struct {
	Live           int     `json:"live_ranks"` // ranks that answer now
	Down           int     `json:"down_ranks"` // ranks that do not answer now
	Advised        int     `json:"advised_ranks"`
	BacklogSeconds float64 `json:"backlog_seconds"` // time that a new request would wait until a rank begins it
	Busy           float64 `json:"busy_share"`      // prefill: share of ranks with a prefill request; decode: share of slots in use
	KV             float64 `json:"kv_share"`        // share of the KV budget in use; 0: unknown
}

// Advice is the advice on the number of ranks of one model.
type Advice struct {
	Model   string  `json:"model"`
	Steps   []Step  `json:"steps"` // at least one step; its kind is None if nothing is to be done
	Says    string  `json:"says"`
	Ratio   float64 `json:"pd_ratio"` // advised prefill ranks for each decode rank; 0: not known yet
	Prefill Side    `json:"prefill"`
	Decode  Side    `json:"decode"`
}

// Settings of an Advisor.
type Settings struct {
	Window     time.Duration // needs are means over this, so that a short peak asks for nothing
	CalmPeriod time.Duration // ranks not needed in all this time may be removed
	Target     float64       // share of their capacity that ranks should use
}

// shortageFactor: the need must exceed the live ranks by this before more are advised. The advice
// then stays until the need no longer exceeds them, so that it does not flicker.
const shortageFactor = 1.1

// Advisor follows one model. It is not safe for concurrent use.
type Advisor struct {
	settings     Settings
	watchedSince time.Time // first sample since a whole side was down
	lastLossAt   time.Time // last sample in which a rank was down or out of service
	samples      []Sample  // of the last Window, the oldest first
	needs        []need    // of the last CalmPeriod, each a mean over a Window
	short        struct{ prefill, decode bool }
}

// New returns an Advisor without samples.
func New(settings Settings) *Advisor { return &Advisor{settings: settings} }

// Observe adds a sample, which must be later than the ones before.
func (a *Advisor) Observe(s Sample) Advice {
	if s.Prefill.Down+s.Prefill.OutOfService+s.Decode.Down+s.Decode.OutOfService > 0 {
		a.lastLossAt = s.At
	}
	if s.Prefill.Live == 0 || s.Decode.Live == 0 {
		return a.adviseOutage(s)
	}
	if len(a.samples) == 0 { // the first one, or the first after an outage
		a.watchedSince = s.At
	}
	a.samples = append(dropBefore(a.samples, s.At.Add(-a.settings.Window), func(s Sample) time.Time { return s.At }), s)
	out := a.windowMeans()
	if s.At.Sub(a.watchedSince) < a.settings.Window {
		out.Steps = []Step{{None, ReasonTooLittleData}}
		out.Says = fmt.Sprintf("How many ranks are needed is not known yet: both sides have been watched for less than %g s.",
			a.settings.Window.Seconds())
		return out
	}
	a.needs = append(dropBefore(a.needs, s.At.Add(-a.settings.CalmPeriod), func(n need) time.Time { return n.at }), a.meanNeed())
	a.advise(&out)
	return out
}

// adviseOutage keeps the needs from before the outage, which give the advised numbers.
func (a *Advisor) adviseOutage(s Sample) Advice {
	a.samples = append(a.samples[:0], s) // so that windowMeans shows only this sample
	out := a.windowMeans()
	a.samples = a.samples[:0] // it must not count in the window after the outage
	step := Step{None, ReasonPrefillDown}
	out.Says = "How many ranks are needed is not known while no prefill rank takes prompts; see /workers."
	if s.Prefill.Live > 0 {
		step.Reason = ReasonDecodeDown
		out.Says = "How many ranks are needed is not known while no decode rank takes requests; see /workers."
	}
	out.Steps = []Step{step}
	if largest := a.largestNeed(s.At.Add(-a.settings.CalmPeriod)); largest.at != (time.Time{}) {
		out.Prefill.Advised = max(s.Prefill.Live, wholeRanks(largest.prefill))
		out.Decode.Advised = max(s.Decode.Live, wholeRanks(largest.decode))
		out.Ratio = float64(out.Prefill.Advised) / float64(out.Decode.Advised)
	}
	return out
}

// windowMeans advises the live ranks. There must be at least one sample.
func (a *Advisor) windowMeans() Advice {
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
	if now.Prefill.Live > 0 { // the ranks share the work, which is in seconds of one rank
		out.Prefill.BacklogSeconds = (now.Prefill.WaitingSeconds + now.Prefill.RunningSeconds) / float64(now.Prefill.Live)
	}
	out.Decode.BacklogSeconds = a.poolWaitSeconds()
	if now.Decode.Live > 0 && now.Prefill.Live > 0 {
		out.Ratio = float64(now.Prefill.Live) / float64(now.Decode.Live)
	}
	return out
}

// endRate is answers per second that ended in the window; 0: none, or not known.
func (a *Advisor) endRate() float64 {
	first, last := &a.samples[0], &a.samples[len(a.samples)-1]
	passedSeconds := last.At.Sub(first.At).Seconds()
	if passedSeconds <= 0 || last.Decode.Ended < first.Decode.Ended {
		return 0
	}
	return float64(last.Decode.Ended-first.Decode.Ended) / passedSeconds
}

// poolWaitSeconds: each answer that ends frees the slot for one hand-off ahead of a new one. If
// none is known to have ended, it is the wait of the oldest hand-off.
func (a *Advisor) poolWaitSeconds() float64 {
	d := &a.samples[len(a.samples)-1].Decode
	if d.Pool == 0 {
		return 0
	}
	if rate := a.endRate(); rate > 0 {
		return float64(d.Pool) / rate
	}
	return d.Oldest.Seconds()
}

// slotSeconds is how long an answer keeps its slot, by Little's law: slots in use per answers that
// end per second. If none is known to have ended, it is backlogGoal: then no slot is expected to
// serve a second request within this time.
func (a *Advisor) slotSeconds() float64 {
	used := 0.0
	for i := range a.samples {
		used += float64(a.samples[i].Decode.Used) / float64(len(a.samples))
	}
	if rate := a.endRate(); rate > 0 {
		return used / rate
	}
	return backlogGoal.Seconds()
}

// meanNeed is the mean over the window. Each side has two needs: for the requests that reach it
// now, and for those that would if the other side had enough ranks.
func (a *Advisor) meanNeed() need {
	mean := need{at: a.samples[len(a.samples)-1].At}
	slotSeconds := a.slotSeconds()
	samples := float64(len(a.samples))
	for i := range a.samples {
		one := needOf(&a.samples[i], a.settings.Target, slotSeconds)
		mean.prefill += one.prefill / samples
		mean.decode += one.decode / samples
		mean.prefillIfDecodeSuffices += one.prefillIfDecodeSuffices / samples
		mean.decodeIfPrefillSuffices += one.decodeIfPrefillSuffices / samples
	}
	return mean
}

// largestNeed takes the largest of each value since a time; at is the time of the last need, zero
// if there was none.
func (a *Advisor) largestNeed(since time.Time) (largest need) {
	for _, n := range a.needs {
		if n.at.Before(since) {
			continue
		}
		largest.at = n.at // the needs are in the order of their times
		largest.prefill = max(largest.prefill, n.prefill)
		largest.decode = max(largest.decode, n.decode)
		largest.prefillIfDecodeSuffices = max(largest.prefillIfDecodeSuffices, n.prefillIfDecodeSuffices)
		largest.decodeIfPrefillSuffices = max(largest.decodeIfPrefillSuffices, n.decodeIfPrefillSuffices)
	}
	return largest
}

// advise: a side that is short by the present need gets the ranks for the largest need of the last
// Window. Ranks beyond the largest need of the last CalmPeriod are spare. This is the need if the
// other side had enough ranks, because a short side holds requests back from the other.
func (a *Advisor) advise(out *Advice) {
	present := a.needs[len(a.needs)-1]
	inWindow, inCalmPeriod := a.largestNeed(present.at.Add(-a.settings.Window)), a.largestNeed(present.at.Add(-a.settings.CalmPeriod))
	a.short.prefill = isShort(a.short.prefill, present.prefill, out.Prefill.Live)
	a.short.decode = isShort(a.short.decode, present.decode, out.Decode.Live)
	// the needs of a CalmPeriod come from these samples
	watchTime := a.settings.Window + a.settings.CalmPeriod
	// While ranks are down, less work reaches the other side, so needs of that time are too low to
	// remove ranks.
	watchedLongEnough := present.at.Sub(a.watchedSince) >= watchTime
	allWereUp := watchedLongEnough && present.at.Sub(a.lastLossAt) >= watchTime
	prefillToSpare := allWereUp && !a.short.prefill && wholeRanks(inCalmPeriod.prefillIfDecodeSuffices) < out.Prefill.Live
	decodeToSpare := allWereUp && !a.short.decode && wholeRanks(inCalmPeriod.decodeIfPrefillSuffices) < out.Decode.Live
	if a.short.prefill {
		out.Prefill.Advised = max(out.Prefill.Live+1, wholeRanks(inWindow.prefill))
	}
	if a.short.decode {
		out.Decode.Advised = max(out.Decode.Live+1, wholeRanks(inWindow.decode))
	}
	if prefillToSpare {
		out.Prefill.Advised = wholeRanks(inCalmPeriod.prefillIfDecodeSuffices)
	}
	if decodeToSpare {
		out.Decode.Advised = wholeRanks(inCalmPeriod.decodeIfPrefillSuffices)
	}
	out.Ratio = float64(out.Prefill.Advised) / float64(out.Decode.Advised)
	switch {
	case a.short.prefill && decodeToSpare: // ranks can change sides
		out.Steps = []Step{{Rebalance, ReasonToPrefill}}
	case a.short.decode && prefillToSpare:
		out.Steps = []Step{{Rebalance, ReasonToDecode}}
	default:
		if a.short.prefill {
			out.Steps = append(out.Steps, Step{AddPrefill, a.whyPrefill(out)})
		}
		if a.short.decode {
			out.Steps = append(out.Steps, Step{AddDecode, a.whyDecode(out)})
		}
		if prefillToSpare {
			out.Steps = append(out.Steps, Step{RemovePrefill, ReasonIdle})
		}
		if decodeToSpare {
			out.Steps = append(out.Steps, Step{RemoveDecode, ReasonIdle})
		}
	}
	out.describe()
}

// describe also adds a step None where there is no other.
func (a *Advice) describe() {
	down := a.Prefill.Down + a.Decode.Down
	a.Says = fmt.Sprintf("Prefill has %s, and %s advised. Decode has %s, and %s advised.", countText(a.Prefill.Live),
		advisedText(a.Prefill.Advised), countText(a.Decode.Live), advisedText(a.Decode.Advised))
	switch {
	case down > 0 && len(a.Steps) == 0:
		a.Steps = []Step{{None, ReasonRanksDown}}
		a.Says = describeDown(a) +
			" Those that answer are enough for what comes now. Whether there are enough ranks for what came before is not " +
			"known until all answer."
	case down > 0:
		them := "them"
		if down == 1 {
			them = "it"
		}
		a.Says += " " + describeDown(a) + " Mend " + them + " first: how many more are needed then is not known."
	case len(a.Steps) == 0:
		a.Steps = []Step{{None, ReasonBalanced}}
	}
}

func describeDown(out *Advice) string {
	var parts []string
	for _, s := range []struct {
		name string
		side Side
	}{{"prefill", out.Prefill}, {"decode", out.Decode}} {
		if s.side.Down > 0 {
			parts = append(parts, fmt.Sprintf("%d of %d %s ranks", s.side.Down, s.side.Down+s.side.Live, s.name))
		}
	}
	verb := "do"
	if out.Prefill.Down+out.Decode.Down == 1 {
		verb = "does"
	}
	return strings.Join(parts, " and ") + " " + verb + " not answer."
}

func countText(ranks int) string {
	if ranks == 1 {
		return "1 rank"
	}
	return fmt.Sprintf("%d ranks", ranks)
}

func advisedText(ranks int) string {
	if ranks == 1 {
		return "1 is"
	}
	return fmt.Sprintf("%d are", ranks)
}

// isShort: if the side was short before, the lower limit counts (shortageFactor).
func isShort(wasShort bool, need float64, live int) bool {
	if wasShort {
		return need > float64(live)
	}
	return need > shortageFactor*float64(live)
}

// whyPrefill: waiting prompts explain more than busy ranks.
func (a *Advisor) whyPrefill(out *Advice) string {
	waitingPerRank := 0.0 // seconds of waiting work per live rank
	for i := range a.samples {
		waitingPerRank += a.samples[i].Prefill.WaitingSeconds / float64(len(a.samples)*out.Prefill.Live)
	}
	switch {
	case waitingPerRank >= 1:
		return ReasonBacklog
	case out.Prefill.KV > out.Prefill.Busy: // KV memory fills up sooner than the ranks' time
		return ReasonKV
	}
	return ReasonBusy
}

// whyDecode: hand-offs also wait if KV memory is short, so it comes first.
func (a *Advisor) whyDecode(out *Advice) string {
	pooled := 0 // waiting hand-offs, summed over the window
	for i := range a.samples {
		pooled += a.samples[i].Decode.Pool
	}
	switch {
	case out.Decode.KV > out.Decode.Busy:
		return ReasonKV
	case pooled >= len(a.samples): // on average at least one waits
		return ReasonPoolWait
	}
	return ReasonBusy
}

// dropBefore drops the elements before from, in place. The list is sorted by time.
func dropBefore[T any](list []T, from time.Time, at func(T) time.Time) []T {
	dropped := 0
	for dropped < len(list) && at(list[dropped]).Before(from) {
		dropped++
	}
	return append(list[:0], list[dropped:]...) // so that the memory is used again
}
