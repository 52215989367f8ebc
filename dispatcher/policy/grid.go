package policy

import "math"

// fixedBits: a column is KV tokens times its weight, in units of 2^-20, so that
// costs are exact and compare as whole numbers. Good for 2^31 tokens a rank in a
// group of 1024.
const fixedBits = 20

// Grid is where evenkeel looks: 0, 1, 2, 4, .. steps ahead, up to the horizon.
func Grid(horizon int) []int {
	steps := []int{0}
	for h := 1; h <= horizon; h *= 2 {
		steps = append(steps, h)
	}
	return steps
}

// Weights are what each step of Grid(horizon) stands for: the discounts gamma^h
// of all steps up to the last that are nearest to it, a tie going to the larger.
// They sum to 1.
func Weights(horizon int, gamma float64) []float64 {
	steps := Grid(horizon)
	weights := make([]float64, len(steps))
	x, sum, at := 1.0, 0.0, 0
	for h := range steps[len(steps)-1] + 1 {
		for at+1 < len(steps) && steps[at+1]-h <= h-steps[at] {
			at++
		}
		weights[at] += x
		sum += x
		x *= gamma
	}
	for i := range weights {
		weights[i] /= sum
	}
	return weights
}

// Expected is how many KV tokens a request that holds so many now is expected to
// hold some steps ahead.
func Expected(o Outlook, held int64, age, ahead int) float64 {
	return float64(held+int64(ahead)) * o.Ratio(age, ahead)
}

// Cost is the J of loads [rank][column]: the imbalance of each column, weighted.
func Cost(loads [][]float64, weights []float64) (cost float64) {
	for c, weight := range weights {
		var most, sum float64
		for g := range loads {
			most = max(most, loads[g][c])
			sum += loads[g][c]
		}
		cost += weight * (float64(len(loads))*most - sum)
	}
	return cost
}

// growthShare of a mean answer is counted as a request's growth.
const growthShare = 0.25

// mode is how evenkeel sees what is ahead.
type mode uint8

const (
	modeSampled mode = iota // several drawn ends of every request
	modeMean                // expected tokens
	modeNow                 // not at all
	modeOracle              // the true end
)

var modeWords = []string{"sampled", "mean", "now", "oracle"}

// lookahead is the grid of a round and what every request contributes to it.
// Columns are scenario after scenario, each with every step of the grid.
type lookahead struct {
	mode      mode
	outlook   Outlook
	scenarios int
	steps     []int64
	weight    []int64 // of a step in one scenario, fixed point
	draws     draws
	ratios    ratios
	sums      []float64

	// Where there is only now, so many KV tokens are counted for a request beyond those it holds:
	// a rank with many short requests grows faster than one with a few long ones.
	growth int64

	horizon int // those the grid was made for
	gamma   float64
}

func (l *lookahead) columns() int { return l.scenarios * len(l.steps) }

// resolve settles the mode and the grid. Until enough outputs were seen, and
// while ticks are too dear, there is only now.
func (l *lookahead) resolve(v *settings, s *Snapshot) {
	l.mode, l.outlook = v.mode, s.Outlook
	_, oracle := s.Outlook.(Oracle)
	switch {
	case s.Outlook == nil, s.Budget > 0 && s.Budget < fewEvaluations,
		v.predictor == "none" && v.mode != modeOracle, v.mode == modeOracle && !oracle:
		l.mode = modeNow
	}
	scenarios, horizon, gamma := 1, 0, 1.0
	l.growth = 0
	switch {
	case l.mode == modeNow && s.Outlook != nil && v.predictor != "none":
		l.growth = int64(s.Outlook.MeanOutput() * growthShare)
	case l.mode != modeNow:
		horizon, gamma = horizonFor(v.horizon, s.Outlook), gammaFor(v.gamma, s.Outlook)
	}
	if l.mode == modeSampled {
		scenarios = v.samples
	}
	if l.steps == nil || scenarios != l.scenarios || horizon != l.horizon || gamma != l.gamma {
		l.scenarios, l.horizon, l.gamma = scenarios, horizon, gamma
		l.steps, l.weight = l.steps[:0], l.weight[:0]
		for _, h := range Grid(horizon) {
			l.steps = append(l.steps, int64(h))
		}
		for _, w := range Weights(horizon, gamma) {
			l.weight = append(l.weight, int64(math.Round(math.Ldexp(w/float64(scenarios), fixedBits))))
		}
	}
	switch l.mode {
	case modeSampled:
		l.draws.resolve(scenarios, s.Outlook, v.predictor == "exact")
		l.draws.makeRoom(s.Workers)
	case modeMean:
		l.ratios.resolve(l.steps, s.Outlook)
	}
}

// project writes the columns of what a rank runs. It returns the KV tokens that
// the rank holds, and how many of them are of requests that do not decode yet.
// Where there is only now, everything on the rank counts as decoding.
func (l *lookahead) project(g int, running []Request, row []int64) (held, later int64) {
	switch l.mode {
	case modeSampled:
		held, later = l.projectSampled(l.draws.of(g), running, row)
	case modeNow:
		for i := range running {
			held += running[i].Tokens()
		}
		row[0] = (held + l.growth*int64(len(running))) << fixedBits
		return held, 0
	case modeMean:
		held, later = l.projectMean(running, row)
	default:
		clear(row)
		for i := range running {
			r := &running[i]
			tokens := r.Tokens()
			held += tokens
			if r.Start > 0 {
				later += tokens
				continue
			}
			row[bucket(l.left(r.ID, r.Age), len(row)-1)] += tokens + counted
		}
		l.unfold(row)
	}
	if later > 0 {
		l.addLater(running, row)
	}
	return held, later
}

// addLater adds the requests that do not decode yet to the columns. They count from now on, though no step reads them
// before their start: counted from there, they would meet ranks that seem to be empty by then, because nobody knows
// what comes into the slots that are free by then. The simulator says that ranks are idle for longer so.
func (l *lookahead) addLater(running []Request, row []int64) {
	for i := range running {
		r := &running[i]
		if r.Start <= 0 {
			continue
		}
		n := len(l.steps)
		switch l.mode {
		case modeMean:
			l.addMean(r.Tokens(), r.Age, r.Start, row)
		case modeOracle:
			l.addResident(r.Tokens(), r.Start, l.left(r.ID, r.Age), row)
		default:
			ends := l.draws.fresh(r.ID, r.Prompt, r.Key, r.Age)
			for z, end := range ends {
				l.addResident(r.Tokens(), r.Start, end-r.Age, row[z*n:][:n])
			}
		}
	}
}

// nearest is the step of the grid, by index, that is nearest to a start.
func (l *lookahead) nearest(start int32) int {
	at := 0
	for at+1 < len(l.steps) && l.weight[at+1] > 0 && l.steps[at+1]-int64(start) <= int64(start)-l.steps[at] {
		at++
	}
	return at
}

// addConstant adds tokens that are there at every step.
func (l *lookahead) addConstant(tokens int64, row []int64) {
	for c := range row {
		row[c] += tokens * l.weight[c%len(l.steps)]
	}
}

// projectSampled is project for one scenario after another: each request is
// counted in the bucket of its last step, then buckets are summed up.
func (l *lookahead) projectSampled(records []int32, running []Request, row []int64) (held, later int64) {
	clear(row)
	size, steps := l.draws.size, len(l.steps)
	for i := range running {
		r := &running[i]
		if r.Start > 0 {
			held, later = held+r.Tokens(), later+r.Tokens()
			continue
		}
		m := records[i*size:][:size]
		if m[recordLow] != int32(r.ID) || m[recordHigh] != int32(r.ID>>32) || uint32(r.Age-m[recordFrom]) >= uint32(m[recordValid]) {
			l.draws.draw(m, r.ID, r.Prompt, r.Key, r.Age)
		}
		tokens := r.Tokens()
		held += tokens
		at := 0
		for _, end := range m[recordEnds:] {
			row[at+bucket(end-r.Age, steps-1)] += tokens + counted
			at += steps
		}
	}
	for at := 0; at < len(row); at += steps {
		l.unfold(row[at:][:steps])
	}
	return held, later
}

// counted is one request in a bucket, above the bits of its tokens.
const counted = 1 << 40

// bucket is the last step of the grid, by index, at which a request with so many
// tokens left (1 at least) is there.
func bucket(left int32, last int) int { return min(bitLen(left-1), last) }

// unfold turns requests by their last step into the load at each step.
func (l *lookahead) unfold(row []int64) {
	steps, weight := l.steps[:len(row)], l.weight[:len(row)]
	var sum int64
	for i := len(row) - 1; i >= 0; i-- {
		sum += row[i]
		row[i] = (sum&(counted-1) + steps[i]*(sum>>40)) * weight[i]
	}
}

func (l *lookahead) projectMean(running []Request, row []int64) (held, later int64) {
	l.sums = sized(l.sums, len(row))
	sums, steps := l.sums[:len(row)], l.steps[:len(row)]
	clear(sums)
	for i := range running {
		r := &running[i]
		tokens := r.Tokens()
		held += tokens
		if r.Start > 0 {
			later += tokens
			continue
		}
		ratios := l.ratios.at(r.Age)[:len(row)]
		for c := range sums {
			sums[c] += float64(tokens+steps[c]) * ratios[c]
		}
	}
	for c, x := range sums {
		row[c] = int64(math.Round(x * float64(l.weight[c])))
	}
	return held, later
}

// project1 writes the columns of a waiting entry.
func (l *lookahead) project1(e *Entry, row []int64) {
	tokens, n := int64(e.Prompt), len(l.steps)
	clear(row)
	switch l.mode {
	case modeNow:
		row[0] = (tokens + l.growth) << fixedBits
	case modeMean:
		l.addMean(tokens, e.Age, e.Start, row)
	case modeOracle:
		l.addResident(tokens, e.Start, l.left(e.ID, e.Age), row)
	default:
		ends := l.draws.fresh(e.ID, e.Prompt, e.Key, e.Age)
		for z, end := range ends {
			l.addResident(tokens, e.Start, end-e.Age, row[z*n:][:n])
		}
	}
}

// addMean adds the expected tokens of a request. One that starts later counts in full until then, and grows from there.
func (l *lookahead) addMean(tokens int64, age, start int32, row []int64) {
	ratios := l.ratios.at(age)
	for c, h := range l.steps {
		ratio := ratios[c]
		if start > 0 {
			h = max(0, h-int64(start))
			ratio = l.outlook.Ratio(int(age), int(h))
		}
		row[c] += int64(math.Round(float64(tokens+h) * ratio * float64(l.weight[c])))
	}
}

// addResident adds tokens that are there until so many steps from a start are over, and grow with each of these.
func (l *lookahead) addResident(tokens int64, start, left int32, row []int64) {
	last := bucket(min(left, math.MaxInt32-start)+start, len(row)-1)
	for i := range row[:last+1] {
		row[i] += (tokens + max(0, l.steps[i]-int64(start))) * l.weight[i]
	}
}

func (l *lookahead) left(id uint64, age int32) int32 {
	return int32(min(max(1, l.outlook.(Oracle).Left(id, int(age))), math.MaxInt32/2))
}
