package detect

import (
	"cmp"
	"slices"
	"time"
)

// Sample has the values of one moment: a few for each second, and more for moments at which the whole proxy was
// examined (Looked). Ended, Failed, Tokens and Failures are totals since the start, so rates and sums are differences of
// two samples.
type Sample struct {
	At       time.Time
	Ended    uint64
	Failed   uint64
	ByKeyLimit      uint64 // failed requests that a limit of the caller's key refused
	Tokens   int64
	Failures map[Outcome]uint64 // never written to
	Whys     map[Outcome]Why    // reason of the last request that failed in this way, if known; never written to
	TTFT     Latency
	TPOT     Latency
	Pool     int
	Ranks    []RankAt
	places   map[int32]int // index of each rank in Ranks; samples of the same ranks share the map
	Rates                  // (found)

	Examined  bool // the whole proxy was examined, so the fields below are known
	Groups  []GroupAt
	at      map[GroupName]int     // index of each group in Groups
	Engines map[EngineName]string // up, drain, or why it gets no requests; also ranks of engines that do not drain as a whole
	Drains  bool
	Policy  string
	Reload  time.Time // when another config last came into force; Unix time 0: never
	Started time.Time // start of the proxy
	Page    []byte    // the live page's data as shown at PageAt, compressed; nil: nothing was shown
	PageAt  time.Time
}

// RankAt is the load of a rank at one moment, with totals of its output so far.
type RankAt struct {
	ID       int32
	Running  int
	KVTokens int64
	Output   int64 // output tokens without the first one of each complete answer, because its wait is no time between tokens
	AnswerCounts         // of all its answers so far, not only the last minute
}

// GroupName identifies a group of ranks.
type GroupName struct{ Model, Group string }

// GroupAt is the load of a group and the pace of its steps at one moment.
type GroupAt struct {
	GroupName
	MostTokens int64
	Law        StepModel
	Usual      bool // nothing was wrong, so later steps are compared with these
	gives      gives
}

// gives is how many tokens a step gives to an answer, and how long a token takes in ms.
type gives struct{ tokens, tokenMs float64 }

// EngineName identifies an engine, or one of its ranks; a prefill engine and a decode engine may have the same name.
type EngineName struct{ Role, Name string }

// How long samples are kept: one per second for FineFor, one per bin of five seconds for BinsFor, and one per
// minute for keptFor.
const (
	Every    = time.Second
	Bin      = 5 * time.Second
	FineFor  = 5 * time.Minute
	BinsFor  = 15 * time.Minute
	keptFor  = time.Hour
	rateOver = 10 // samples that a rate is taken over

	mostRanks = 400_000  // rank records in all samples of a tier, to bound memory
	mostPages = 16 << 20 // bytes of pages in a tier
)

// Ring keeps samples in three tiers: one per second, one per bin, one per minute. Longer steps go back further.
type Ring struct {
	fine, bins, minutes tier
}

// tier keeps the last sample of each step of time, for as long as keep. The oldest is first.
type tier struct {
	step, keep time.Duration
	list       []Sample
}

// Add adds a sample. If the clock was set back by up to a bin, the sample gets the time of the last one. If it was set
// back further, all samples are dropped, because their times lie in the future.
func (r *Ring) Add(s Sample) {
	s.At = s.At.Round(0) // drop the monotonic reading, because steps are cut by the wall clock
	if last := r.Last(); last != nil && s.At.Before(last.At) {
		if last.At.Sub(s.At) > Bin {
			*r = Ring{}
		} else {
			s.At = last.At
		}
	}
	if r.fine.step == 0 {
		r.fine, r.bins, r.minutes = tier{Every, FineFor, nil}, tier{Bin, BinsFor + Bin, nil}, tier{time.Minute, keptFor, nil}
	}
	s.indexRanks(r.Last())
	r.fine.add(s)
	s.Rates = r.rates()
	second := r.fine.last()
	second.Rates = s.Rates
	second.Examined, second.Groups, second.Engines = false, nil, nil // only the longer tiers keep what a look provides
	r.fine.limit()
	s.Ranks, s.places, s.Whys = nil, nil, nil // only the samples of single seconds keep these
	r.bins.add(s)
	r.bins.limit()
	s.Page = nil
	r.minutes.add(s)
}

// add adds a sample, and drops those that are older than keep. It replaces the sample of the same step, if there is one.
func (t *tier) add(s Sample) {
	if n := len(t.list); n > 0 && t.list[n-1].At.Truncate(t.step).Equal(s.At.Truncate(t.step)) {
		s.takeOver(&t.list[n-1])
		t.list = t.list[:n-1]
	}
	t.list = append(t.list, s)
	old := 0
	for old < len(t.list)-1 && s.At.Truncate(t.step).Sub(t.list[old].At.Truncate(t.step)) >= t.keep {
		t.list[old] = Sample{} // frees its memory, because the slice still holds the place
		old++
	}
	t.list = t.list[old:]
}

// indexRanks sets the index of each rank in Ranks, and shares the map with the sample before if the ranks are the same.
func (s *Sample) indexRanks(before *Sample) {
	if before != nil && before.places != nil && slices.EqualFunc(s.Ranks, before.Ranks, func(a, b RankAt) bool { return a.ID == b.ID }) {
		s.places = before.places
		return
	}
	s.places = make(map[int32]int, len(s.Ranks))
	for i := range s.Ranks {
		s.places[s.Ranks[i].ID] = i
	}
}

// takeOver copies values from the earlier sample of the same step, which this sample replaces: values that this sample lacks, the largest
// loads of groups, and steps that were usual.
func (s *Sample) takeOver(before *Sample) {
	if s.Page == nil {
		s.Page, s.PageAt = before.Page, before.PageAt
	}
	if !before.Examined {
		return
	}
	if !s.Examined {
		s.Examined, s.Groups, s.at, s.Engines = true, before.Groups, before.at, before.Engines
		s.Drains, s.Policy, s.Reload, s.Started = before.Drains, before.Policy, before.Reload, before.Started
		return
	}
	s.Groups = slices.Clone(s.Groups) // another tier may share the slice
	for i := range before.Groups {
		earlier := &before.Groups[i]
		k, ok := s.at[earlier.GroupName]
		if !ok {
			continue
		}
		g := &s.Groups[k]
		g.MostTokens = max(g.MostTokens, earlier.MostTokens)
		if earlier.Usual && !g.Usual {
			g.Usual, g.Law, g.gives = true, earlier.Law, earlier.gives
		}
	}
}

// limit drops rank records and pages of the oldest samples until the tier has at most mostRanks records and mostPages bytes.
func (t *tier) limit() {
	ranks, pages := 0, 0
	for i := len(t.list) - 1; i >= 0; i-- {
		s := &t.list[i]
		if ranks += len(s.Ranks); ranks > mostRanks {
			s.Ranks, s.places = nil, nil
		}
		if pages += len(s.Page); pages > mostPages {
			s.Page = nil
		}
	}
}

// Last is the newest sample; nil: there is none.
func (r *Ring) Last() *Sample { return r.fine.last() }

func (t *tier) last() *Sample {
	if len(t.list) == 0 {
		return nil
	}
	return &t.list[len(t.list)-1]
}

// Seconds returns the samples of the last minutes. They must not be changed.
func (r *Ring) Seconds() []Sample { return r.fine.list }

// Bins returns the samples of the last quarter of an hour. They must not be changed.
func (r *Ring) Bins() []Sample { return r.bins.list }

// since is the oldest sample that is no older than age; nil: there is none.
func (r *Ring) since(age time.Duration) (oldest *Sample) {
	for _, t := range []*tier{&r.fine, &r.bins, &r.minutes} {
		i := slices.IndexFunc(t.list, func(s Sample) bool { return r.Last().At.Sub(s.At) <= age })
		if i >= 0 && (oldest == nil || t.list[i].At.Before(oldest.At)) {
			oldest = &t.list[i]
		}
	}
	return oldest
}

// Keep stores the page that is shown now in the newest bin.
func (r *Ring) Keep(page []byte, at time.Time) {
	if s := r.bins.last(); s != nil {
		s.Page, s.PageAt = page, at
		r.bins.limit()
	}
}

// Page returns the last page that was shown at or before the given time.
func (r *Ring) Page(at time.Time) (page []byte, ok bool) {
	for i := len(r.bins.list) - 1; i >= 0; i-- {
		if s := &r.bins.list[i]; s.Page != nil && !s.PageAt.After(at) {
			return s.Page, true
		}
	}
	return nil, false
}

// rates returns mean rates over the last rateOver seconds, from the totals of the first and the last sample.
func (r *Ring) rates() (t Rates) {
	n := len(r.fine.list)
	if n < 2 {
		return t
	}
	window := r.fine.list[max(0, n-1-rateOver):]
	first, last := &window[0], &window[len(window)-1]
	if s := last.At.Sub(first.At).Seconds(); s > 0 {
		t.RequestsPerS = float64(last.Ended-min(last.Ended, first.Ended)) / s
		t.FailuresPerS = float64(last.Failed-min(last.Failed, first.Failed)) / s
		t.ByKeyLimitPerS = float64(last.ByKeyLimit-min(last.ByKeyLimit, first.ByKeyLimit)) / s
		t.TokensPerS = float64(max(0, last.Tokens-first.Tokens)) / s
		t.Recovered = recovered(window)
	}
	return t
}

const (
	enoughFailures = 5               // failures that a lasting fault would have caused since the last failure
	calmFor        = 3 * time.Second // least time without a failure: at high rates, many requests succeed between two failures
)

// recovered says whether the failures in a window have stopped. It compares single samples, because a rate over ten seconds shows failures
// for ten seconds after they stopped. They have stopped if the last one is at least calmFor ago, and if at least enoughFailures of the
// requests since then would have failed at the earlier share of failures. Where no request failed, nothing has stopped: it returns false.
func recovered(window []Sample) bool {
	first, last := &window[0], &window[len(window)-1]
	for i := len(window) - 1; i > 0; i-- {
		if fault := &window[i]; fault.Failed > window[i-1].Failed { // the last failure
			since, failed, ended := last.Ended-fault.Ended, fault.Failed-first.Failed, fault.Ended-first.Ended
			return last.At.Sub(fault.At) >= calmFor && since*failed >= enoughFailures*ended // since * failed/ended would have failed
		}
	}
	return false
}

// Ended counts the requests that ended in some time, and those of them that failed.
type Ended struct{ All, Failed uint64 }

func (r *Ring) lastMinute() (e Ended) {
	last, first := r.Last(), r.since(time.Minute)
	if last == nil {
		return e
	}
	return Ended{last.Ended - min(last.Ended, first.Ended), last.Failed - min(last.Failed, first.Failed)}
}

// failures returns the counts of all ways in which requests failed. Those with the most failures in the last seconds come first.
func (r *Ring) failures() []Failed {
	last := r.Last()
	if last == nil {
		return []Failed{}
	}
	seconds, minute, minutes, hour := r.since(2*Bin), r.since(time.Minute), r.since(FineFor), r.since(keptFor)
	list := make([]Failed, 0, len(last.Failures))
	for o, n := range last.Failures {
		// failures of this outcome since an earlier sample
		since := func(first *Sample) uint64 { return n - min(n, first.Failures[o]) }
		list = append(list, Failed{
			Outcome: o.Name, Status: o.Status, Last10S: since(seconds), LastMinute: since(minute), Last5Min: since(minutes),
			LastHour: since(hour), SinceStart: n,
			Why: last.Whys[o].Text, ByKeyLimit: last.Whys[o].ByKeyLimit,
		})
	}
	slices.SortFunc(list, func(a, b Failed) int {
		return cmp.Or(cmp.Compare(b.Last10S, a.Last10S), cmp.Compare(b.LastMinute, a.LastMinute), cmp.Compare(b.Last5Min, a.Last5Min),
			cmp.Compare(b.LastHour, a.LastHour),
			cmp.Compare(b.SinceStart, a.SinceStart), cmp.Compare(a.Outcome, b.Outcome), cmp.Compare(a.Status, b.Status))
	})
	return list
}
