package detect

import (
	"cmp"
	"slices"
	"time"
)

// Sample has the values of one moment: a few for each second, and more for moments at which the whole proxy was
// examined (Examined). Ended, Failed, Tokens and Failures are totals since the start, so rates and sums are differences of
// two samples.
type Sample struct {
	At         time.Time
	Ended      uint64
	Failed     uint64
	ByKeyLimit uint64 // failed requests that a limit of the caller's key refused
	Tokens     int64
	Failures   map[Outcome]uint64 // total of failed requests by outcome; samples may share the map, so it is never changed
	Whys       map[Outcome]Why    // reason of the last request that failed in this way, if known; the map is never changed
	TTFT       Latency
	TPOT       Latency
	Pool       int
	Ranks      []RankAt
	rankIndex  map[int32]int // index of each rank in Ranks; samples of the same ranks share the map
	Rates                    // rates over the last ten seconds; Ring.Add fills them in

	LateMs     float64 // by how much timers of the proxy fired late since the sample before, all together
	LatestMs   float64 // the same for the latest timer
	CPUSeconds float64 // processor time of the proxy since its start
	Cores      int     // processors that the proxy may use
	open       int64   // requests of clients that are not over, at the last examination of the whole proxy

	Examined   bool // the whole proxy was examined, so the fields from Groups to Started are known
	Groups     []GroupAt
	groupIndex map[GroupName]int     // index of each group in Groups
	Engines    map[EngineName]string // up, drain, or a state without requests; also for ranks of engines that do not drain as a whole
	Drains     bool
	Policy     string
	Reload     time.Time // when another config last came into force; Unix time 0: never
	Started    time.Time // start of the proxy
	Page       []byte    // the live page's data as shown at PageAt, compressed; nil: nothing was shown
	PageAt     time.Time
}

// RankAt is the load of a rank at one moment, with totals of its output so far.
type RankAt struct {
	ID           int32
	Running      int
	KVTokens     int64
	Output       int64 // output tokens without the first one of each complete answer, whose wait is no time between tokens
	AnswerCounts       // counts of all the rank's answers so far, not only of the last minute
}

// GroupName identifies a group of ranks. It includes the model, because groups of two models may have the same name.
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

// EngineName identifies an engine, or one of its ranks; a prefill engine and a decode engine may have the same name.
type EngineName struct{ Role, Name string }

// How long samples are kept: one per second for SecondsKeptFor, one per bin of five seconds for BinsKeptFor, and one per
// minute for minutesKeptFor.
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

// Ring keeps samples in three tiers: one per second, one per bin, one per minute. The tiers with longer intervals go back further in time.
type Ring struct {
	fine, bins, minutes tier
}

// tier keeps the last sample of each interval (a second, a bin or a minute), for as long as keptFor. The oldest is first.
type tier struct {
	interval, keptFor time.Duration
	list              []Sample
}

// Add adds a sample to each of the three tiers, without the values that the tier does not need. If the clock was set back by up to a bin,
// the sample gets the time of the last one. If it was set back further, all samples are dropped, because their times lie in the future.
func (r *Ring) Add(s Sample) {
	s.At = s.At.Round(0) // drop the monotonic reading, because the intervals of the tiers are cut by the wall clock
	if last := r.Last(); last != nil && s.At.Before(last.At) {
		if last.At.Sub(s.At) > BinLength {
			*r = Ring{}
		} else {
			s.At = last.At
		}
	}
	if r.fine.interval == 0 { // the ring is new, or was dropped above
		r.fine = tier{interval: SampleInterval, keptFor: SecondsKeptFor}
		r.bins = tier{interval: BinLength, keptFor: BinsKeptFor + BinLength} // one bin more, because the newest bin is not full yet
		r.minutes = tier{interval: time.Minute, keptFor: minutesKeptFor}
	}
	if last := r.Last(); last != nil && !s.Examined {
		s.open = last.open
	}
	s.indexRanks(r.Last())                       // sets rankIndex, and shares the map of the last sample if both have the same ranks
	s.Rates = r.addSecond(s)                     // means over ten seconds, which only the tier of single seconds can give
	s.Ranks, s.rankIndex, s.Whys = nil, nil, nil // only the tier of single seconds keeps ranks and reasons
	r.bins.add(s)
	r.bins.dropOverLimits()
	s.Page = nil     // PageAt looks for live pages in the bins only
	r.minutes.add(s) // needs no dropOverLimits: the limits are for ranks and pages, which minutes do not keep
}

// addSecond adds a sample to the tier of single seconds, which does not keep what an examination of the whole proxy provides. It returns
// the rates over the last ten seconds, which include this sample, and stores them with it.
func (r *Ring) addSecond(s Sample) Rates {
	r.fine.add(s)
	stored := r.fine.last()
	stored.Rates = r.rates()
	stored.Examined, stored.Groups, stored.Engines = false, nil, nil
	r.fine.dropOverLimits()
	return stored.Rates
}

// add adds a sample, and drops those that are older than keptFor. It replaces the sample of the same interval, if there is one.
func (t *tier) add(s Sample) {
	now := s.At.Truncate(t.interval)
	if before := t.last(); before != nil && before.At.Truncate(t.interval).Equal(now) { // the tier keeps one sample per interval
		s.mergeEarlier(before)
		t.list = t.list[:len(t.list)-1]
	}
	t.list = append(t.list, s)
	tooOld := 0 // number of samples at the front that are older than keptFor
	for tooOld < len(t.list)-1 && now.Sub(t.list[tooOld].At.Truncate(t.interval)) >= t.keptFor {
		t.list[tooOld] = Sample{} // frees the sample's memory, because the slice's array still holds it
		tooOld++
	}
	t.list = t.list[tooOld:]
}

// indexRanks sets rankIndex. It shares the map with the sample before if the ranks are the same, because a map for each second would take
// much memory.
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

// mergeEarlier copies values from an earlier sample, which this sample replaces in a tier: both are of the same second, bin or minute.
//
// All samples have the counts of requests. Those for which the whole proxy was examined (Examined) also have the states of engines and
// groups. A live page is added to a sample only when the page is shown. mergeEarlier copies what this sample lacks. If both were examined,
// it also takes the larger load of each group, and steps without a fault (Usual), because later steps are compared with them.
func (s *Sample) mergeEarlier(before *Sample) {
	s.LateMs, s.LatestMs = s.LateMs+before.LateMs, max(s.LatestMs, before.LatestMs)
	if s.Page == nil {
		s.Page, s.PageAt = before.Page, before.PageAt
	}
	if !before.Examined { // then it has nothing else that this sample may lack
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

// dropOverLimits drops rank records and pages, those of the oldest samples first, until the tier has at most maxRankRecords records and
// maxPageBytes bytes of pages.
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

// Last is the newest sample; nil: there is none.
func (r *Ring) Last() *Sample { return r.fine.last() }

func (t *tier) last() *Sample {
	if len(t.list) == 0 {
		return nil
	}
	return &t.list[len(t.list)-1]
}

// Seconds returns the samples of the last five minutes, one per second. They must not be changed.
func (r *Ring) Seconds() []Sample { return r.fine.list }

// Bins returns the samples of the last quarter of an hour, one per five seconds. They must not be changed.
func (r *Ring) Bins() []Sample { return r.bins.list }

// oldestWithin returns the oldest sample that is no older than age; nil: there is none.
func (r *Ring) oldestWithin(age time.Duration) (oldest *Sample) {
	for _, t := range []*tier{&r.fine, &r.bins, &r.minutes} {
		i := slices.IndexFunc(t.list, func(s Sample) bool { return r.Last().At.Sub(s.At) <= age })
		if i >= 0 && (oldest == nil || t.list[i].At.Before(oldest.At)) {
			oldest = &t.list[i]
		}
	}
	return oldest
}

// KeepPage stores the compressed live page that is shown now in the newest bin.
func (r *Ring) KeepPage(page []byte, at time.Time) {
	if s := r.bins.last(); s != nil {
		s.Page, s.PageAt = page, at
		r.bins.dropOverLimits()
	}
}

// PageAt returns the last live page that was shown at or before the given time, compressed; ok is false if no such page is kept.
func (r *Ring) PageAt(at time.Time) (page []byte, ok bool) {
	for i := len(r.bins.list) - 1; i >= 0; i-- {
		if s := &r.bins.list[i]; s.Page != nil && !s.PageAt.After(at) {
			return s.Page, true
		}
	}
	return nil, false
}

// rates returns mean rates per second, from the totals of the newest sample and of the one that is rateSamples samples older, or of the
// oldest one. r.fine has one sample for each second. ByKeyLimitPerS is the part of the failures that limits of the callers' API keys have
// caused. Recovered says whether requests failed in this time and no longer do. The result is zero if there are fewer than two samples. A
// total that has become smaller counts as no growth.
func (r *Ring) rates() (rates Rates) {
	count := len(r.fine.list)
	if count < 2 {
		return rates
	}
	window := r.fine.list[max(0, count-1-rateSamples):]
	first, last := &window[0], &window[len(window)-1]
	if s := last.At.Sub(first.At).Seconds(); s > 0 { // so that nothing is divided by 0
		rates.RequestsPerS = float64(last.Ended-min(last.Ended, first.Ended)) / s
		rates.FailuresPerS = float64(last.Failed-min(last.Failed, first.Failed)) / s
		rates.ByKeyLimitPerS = float64(last.ByKeyLimit-min(last.ByKeyLimit, first.ByKeyLimit)) / s
		rates.TokensPerS = float64(max(0, last.Tokens-first.Tokens)) / s
		rates.Recovered = recovered(window)
	}
	return rates
}

const (
	enoughFailures = 5               // failures that a lasting fault would have caused since the last failure
	calmFor        = 3 * time.Second // least time without a failure, because at high rates many requests succeed between two failures
)

// recovered says whether the failures in a window have stopped. It compares single samples, because a rate over ten seconds shows failures
// for ten seconds after they stopped. They have stopped if the last one is at least calmFor ago, and if at least enoughFailures of the
// requests since then would have failed at the earlier share of failures. Where no request failed, nothing has stopped: it returns false.
func recovered(window []Sample) bool {
	first, last := &window[0], &window[len(window)-1]
	for i := len(window) - 1; i > 0; i-- {
		fault := &window[i]
		if fault.Failed <= window[i-1].Failed { // no request failed between the two samples
			continue
		}
		failed, ended := fault.Failed-first.Failed, fault.Ended-first.Ended // up to the last failure
		endedSince := last.Ended - fault.Ended                              // after the last failure
		// At the earlier share of failures, endedSince * failed/ended requests would have failed since. The comparison needs no
		// division.
		enoughWouldHaveFailed := endedSince*failed >= enoughFailures*ended
		return last.At.Sub(fault.At) >= calmFor && enoughWouldHaveFailed
	}
	return false
}

// Ended counts the requests that ended in some time, and those of them that failed.
type Ended struct{ All, Failed uint64 }

// lastMinute counts the requests that ended in the last minute; zero if there is no sample.
func (r *Ring) lastMinute() (e Ended) {
	last, first := r.Last(), r.oldestWithin(time.Minute)
	if last == nil {
		return e
	}
	return Ended{last.Ended - min(last.Ended, first.Ended), last.Failed - min(last.Failed, first.Failed)}
}

// failures returns the counts of all ways in which requests failed. Those with the most failures in the last ten seconds come first.
func (r *Ring) failures() []Failed {
	last := r.Last()
	if last == nil {
		return []Failed{}
	}
	tenSecondsAgo, minuteAgo := r.oldestWithin(10*time.Second), r.oldestWithin(time.Minute)
	fiveMinutesAgo, hourAgo := r.oldestWithin(5*time.Minute), r.oldestWithin(time.Hour)
	list := make([]Failed, 0, len(last.Failures))
	for o, total := range last.Failures {
		// failures of this outcome since an earlier sample
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
