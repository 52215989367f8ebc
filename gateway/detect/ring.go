package detect

import (
	"cmp"
	"slices"
	"time"
)

// Sample has the values of one moment. Ended, Failed, Tokens and Failures are totals since the
// start, so rates and sums are differences of two samples.
type Sample struct {
	At         time.Time
	Ended      uint64
	Failed     uint64
	ByKeyLimit uint64 // failed requests that a limit of the caller's key refused
	Tokens     int64
	Failures   map[Outcome]uint64 // by outcome; samples may share the map, so it is never changed
	// of the last request that failed in this way; the map is never changed
	Whys      map[Outcome]Why
	TTFT      Latency
	TPOT      Latency
	Pool      int
	Ranks     []RankAt
	rankIndex map[int32]int // index of each rank in Ranks; samples of the same ranks share the map
	Rates                   // filled in by Ring.Add

	// by how much timers of the proxy fired late since the sample before, all together
	LateMs     float64
	LatestMs   float64 // the same for the latest timer
	CPUSeconds float64 // processor time of the proxy since its start
	Cores      int     // processors that the proxy may use
	// requests of clients that are not over, at the last examination of the whole proxy
	open int64

	Examined   bool // the whole proxy was examined: the fields from Groups to Started are known
	Groups     []GroupAt
	groupIndex map[GroupName]int // index in Groups
	// up, drain, or a state without requests; also for ranks of engines that do not drain as a whole
	Engines map[EngineName]string
	Drains  bool
	Policy  string
	Reload  time.Time // when another config came into force; Unix time 0: never
	Started time.Time
	Page    []byte // the live page as shown at PageAt, compressed; nil: nothing was shown
	PageAt  time.Time
}

// RankAt is the load of a rank at one moment, with totals of its output so far.
type RankAt struct {
	ID       int32
	Running  int
	KVTokens int64
	// without the first token of each complete answer, whose wait is no time between tokens
	Output       int64
	AnswerCounts // of all the rank's answers so far
}

// GroupName includes the model, because groups of two models may have the same name.
type GroupName struct{ Model, Group string }

// GroupAt is the load of a group and the pace of its steps at one moment.
type GroupAt struct {
	GroupName
	MostTokens int64
	StepModel  StepModel
	Usual      bool // the steps had no fault, so later steps are compared with them
	yield      stepYield
}

// stepYield is how many tokens a step gives to an answer, and how long a token takes.
type stepYield struct{ tokens, tokenMs float64 }

// EngineName is an engine or rank; a prefill and a decode engine may have the same name.
type EngineName struct{ Role, Name string }

// How long samples are kept: one per second, per bin, and per minute.
const (
	SampleInterval = time.Second
	BinLength      = 5 * time.Second
	SecondsKeptFor = 5 * time.Minute
	BinsKeptFor    = 15 * time.Minute
	minutesKeptFor = time.Hour
	rateSamples    = 10 // a rate is a mean over this many intervals of SampleInterval

	maxRankRecords = 400_000  // rank records in all samples of a tier, to bound memory
	maxPageBytes   = 16 << 20 // bytes of live pages in a tier, to bound memory
)

// Ring keeps samples in three tiers: one per second, one per bin, one per minute. The tiers with
// longer intervals go back further in time.
type Ring struct {
	fine, bins, minutes tier
}

// tier keeps the last sample of each interval, the oldest first.
type tier struct {
	interval, keptFor time.Duration
	list              []Sample
}

// Add adds a sample to each tier. If the clock was set back by up to a bin, the sample gets the
// time of the last one. If it was set back further, all samples are dropped, because their times
// lie in the future.
func (r *Ring) Add(s Sample) {
	// drop the monotonic reading, because the intervals of the tiers are cut by the wall clock
	s.At = s.At.Round(0)
	if last := r.Last(); last != nil && s.At.Before(last.At) {
		if last.At.Sub(s.At) > BinLength {
			*r = Ring{}
		} else {
			s.At = last.At
		}
	}
	if r.fine.interval == 0 { // new, or dropped above
		r.fine = tier{interval: SampleInterval, keptFor: SecondsKeptFor}
		// one more, because the newest bin is not full yet
		r.bins = tier{interval: BinLength, keptFor: BinsKeptFor + BinLength}
		r.minutes = tier{interval: time.Minute, keptFor: minutesKeptFor}
	}
	if last := r.Last(); last != nil && !s.Examined {
		s.open = last.open
	}
	s.indexRanks(r.Last())
	s.Rates = r.addSecond(s)                     // only the tier of single seconds can give them
	s.Ranks, s.rankIndex, s.Whys = nil, nil, nil // only single seconds keep them
	r.bins.add(s)
	r.bins.dropOverLimits()
	s.Page = nil     // PageAt looks in the bins only
	r.minutes.add(s) // keeps nothing that dropOverLimits bounds
}

// addSecond keeps nothing that only an examination of the whole proxy provides. It returns the
// rates, which include this sample.
func (r *Ring) addSecond(s Sample) Rates {
	r.fine.add(s)
	stored := r.fine.last()
	stored.Rates = r.rates()
	stored.Examined, stored.Groups, stored.Engines = false, nil, nil
	r.fine.dropOverLimits()
	return stored.Rates
}

// add replaces the sample of the same interval, if any.
func (t *tier) add(s Sample) {
	now := s.At.Truncate(t.interval)
	if before := t.last(); before != nil && before.At.Truncate(t.interval).Equal(now) {
		s.mergeEarlier(before)
		t.list = t.list[:len(t.list)-1]
	}
	t.list = append(t.list, s)
	tooOld := 0 // number of samples at the front that are older than keptFor
	for tooOld < len(t.list)-1 && now.Sub(t.list[tooOld].At.Truncate(t.interval)) >= t.keptFor {
		t.list[tooOld] = Sample{} // frees its memory: the slice's array still holds it
		tooOld++
	}
	t.list = t.list[tooOld:]
}

// indexRanks shares the map if the ranks are the same, because one per second would take much
// memory.
func (s *Sample) indexRanks(before *Sample) {
	hasIndex := before != nil && before.rankIndex != nil // dropOverLimits may have dropped it
	if hasIndex && slices.EqualFunc(s.Ranks, before.Ranks, func(a, b RankAt) bool { return a.ID == b.ID }) {
		s.rankIndex = before.rankIndex
		return
	}
	s.rankIndex = make(map[int32]int, len(s.Ranks))
	for i := range s.Ranks {
		s.rankIndex[s.Ranks[i].ID] = i
	}
}

// mergeEarlier copies what this sample lacks from the one of the same interval that it replaces. If
// both were examined, it takes the larger load of each group, and steps without a fault (Usual).
func (s *Sample) mergeEarlier(before *Sample) {
	s.LateMs, s.LatestMs = s.LateMs+before.LateMs, max(s.LatestMs, before.LatestMs)
	if s.Page == nil {
		s.Page, s.PageAt = before.Page, before.PageAt
	}
	if !before.Examined { // it has nothing else that this sample may lack
		return
	}
	if !s.Examined {
		s.Examined, s.Groups, s.groupIndex, s.Engines = true, before.Groups, before.groupIndex, before.Engines
		s.Drains, s.Policy, s.Reload, s.Started = before.Drains, before.Policy, before.Reload, before.Started
		return
	}
	s.Groups = slices.Clone(s.Groups) // another tier may share the slice
	for i := range before.Groups {
		earlier := &before.Groups[i]
		k, stillThere := s.groupIndex[earlier.GroupName]
		if !stillThere {
			continue
		}
		g := &s.Groups[k]
		g.MostTokens = max(g.MostTokens, earlier.MostTokens)
		if earlier.Usual && !g.Usual {
			g.Usual, g.StepModel, g.yield = true, earlier.StepModel, earlier.yield
		}
	}
}

// dropOverLimits begins with the oldest samples.
func (t *tier) dropOverLimits() {
	ranks, pageBytes := 0, 0
	for i := len(t.list) - 1; i >= 0; i-- {
		s := &t.list[i]
		if ranks += len(s.Ranks); ranks > maxRankRecords {
			s.Ranks, s.rankIndex = nil, nil
		}
		if pageBytes += len(s.Page); pageBytes > maxPageBytes {
			s.Page = nil
		}
	}
}

// Last is the newest sample; nil: none.
func (r *Ring) Last() *Sample { return r.fine.last() }

func (t *tier) last() *Sample {
	if len(t.list) == 0 {
		return nil
	}
	return &t.list[len(t.list)-1]
}

// Seconds are the last five minutes. They must not be changed.
func (r *Ring) Seconds() []Sample { return r.fine.list }

// Bins are the last quarter of an hour. They must not be changed.
func (r *Ring) Bins() []Sample { return r.bins.list }

// oldestWithin returns nil if there is none.
func (r *Ring) oldestWithin(age time.Duration) (oldest *Sample) {
	for _, t := range []*tier{&r.fine, &r.bins, &r.minutes} {
		i := slices.IndexFunc(t.list, func(s Sample) bool { return r.Last().At.Sub(s.At) <= age })
		if i >= 0 && (oldest == nil || t.list[i].At.Before(oldest.At)) {
			oldest = &t.list[i]
		}
	}
	return oldest
}

// KeepPage stores the compressed live page in the newest bin.
func (r *Ring) KeepPage(page []byte, at time.Time) {
	if s := r.bins.last(); s != nil {
		s.Page, s.PageAt = page, at
		r.bins.dropOverLimits()
	}
}

// PageAt returns the last live page that was shown by then, compressed.
func (r *Ring) PageAt(at time.Time) (page []byte, ok bool) {
	for i := len(r.bins.list) - 1; i >= 0; i-- {
		if s := &r.bins.list[i]; s.Page != nil && !s.PageAt.After(at) {
			return s.Page, true
		}
	}
	return nil, false
}

// rates are means over rateSamples seconds, or fewer; zero for fewer than two samples. A total that
// has become smaller counts as no growth.
func (r *Ring) rates() (rates Rates) {
	count := len(r.fine.list)
	if count < 2 {
		return rates
	}
	window := r.fine.list[max(0, count-1-rateSamples):]
	first, last := &window[0], &window[len(window)-1]
	if s := last.At.Sub(first.At).Seconds(); s > 0 {
		rates.RequestsPerS = float64(last.Ended-min(last.Ended, first.Ended)) / s
		rates.FailuresPerS = float64(last.Failed-min(last.Failed, first.Failed)) / s
		rates.ByKeyLimitPerS = float64(last.ByKeyLimit-min(last.ByKeyLimit, first.ByKeyLimit)) / s
		rates.TokensPerS = float64(max(0, last.Tokens-first.Tokens)) / s
		rates.Recovered = recovered(window)
	}
	return rates
}

const (
	// failures that a lasting fault would have caused since the last failure
	enoughFailures = 5
	calmFor        = 3 * time.Second // at high rates many requests succeed between two failures
)

// recovered says whether the failures have stopped. It compares single samples, because a rate over
// ten seconds shows failures for ten seconds after they stopped. At least enoughFailures of the
// requests since the last one must have failed at the earlier share. Where no request failed,
// nothing has stopped.
func recovered(window []Sample) bool {
	first, last := &window[0], &window[len(window)-1]
	for i := len(window) - 1; i > 0; i-- {
		fault := &window[i]
		if fault.Failed <= window[i-1].Failed {
			continue
		}
		failed, ended := fault.Failed-first.Failed, fault.Ended-first.Ended // up to the last failure
		endedSince := last.Ended - fault.Ended
		// So many would have failed since: endedSince * failed/ended. The comparison needs no division.
		enoughWouldHaveFailed := endedSince*failed >= enoughFailures*ended
		return last.At.Sub(fault.At) >= calmFor && enoughWouldHaveFailed
	}
	return false
}

// Ended counts the requests that ended in some time, and those of them that failed.
type Ended struct{ All, Failed uint64 }

func (r *Ring) lastMinute() (e Ended) {
	last, first := r.Last(), r.oldestWithin(time.Minute)
	if last == nil {
		return e
	}
	return Ended{last.Ended - min(last.Ended, first.Ended), last.Failed - min(last.Failed, first.Failed)}
}

// failures lists those with the most in the last ten seconds first.
func (r *Ring) failures() []Failed {
	last := r.Last()
	if last == nil {
		return []Failed{}
	}
	tenSecondsAgo, minuteAgo := r.oldestWithin(10*time.Second), r.oldestWithin(time.Minute)
	fiveMinutesAgo, hourAgo := r.oldestWithin(5*time.Minute), r.oldestWithin(time.Hour)
	list := make([]Failed, 0, len(last.Failures))
	for o, total := range last.Failures {
		since := func(earlier *Sample) uint64 { return total - min(total, earlier.Failures[o]) }
		list = append(list, Failed{
			Outcome: o.Name, Status: o.Status, Last10S: since(tenSecondsAgo), LastMinute: since(minuteAgo), Last5Min: since(fiveMinutesAgo),
			LastHour: since(hourAgo), SinceStart: total,
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
