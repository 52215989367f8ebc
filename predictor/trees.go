package predictor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
)

// What the trees see of a request at an age. All of it is known at that
// moment: the lengths are of requests that had finished by then.
const (
	fPrompt    = iota
	fLogPrompt // log1p: its bins are evenly wide, so they resolve the tail the others leave whole
	fAge
	fLogAge
	fP       // survival's P at the age
	fMu      // survival's Mu
	fOutput  // four of outputs: weighted mean 0.9, 0.99, mean and 90th percentile of the last 256
	fInput   = fOutput + 4
	features = fInput + 4
)

var featureNames = [features]string{
	"prompt", "log1p_prompt", "age", "log1p_age", "survival_p", "survival_mu",
	"output_ewma_0.9", "output_ewma_0.99", "output_mean_256", "output_p90_256",
	"prompt_ewma_0.9", "prompt_ewma_0.99", "prompt_mean_256", "prompt_p90_256",
}

type vector [features]float32

// ofRequest fills in what depends on prompt and age alone.
func (v *vector) ofRequest(prompt, age int32) {
	v[fPrompt], v[fLogPrompt] = float32(prompt), log1p(prompt)
	v[fAge], v[fLogAge] = float32(age), log1p(age)
}

func (v *vector) ofTable(p Prediction) { v[fP], v[fMu] = float32(p.P), float32(p.Mu) }

func (v *vector) ofTraffic(outputs, prompts [4]float32) {
	copy(v[fOutput:], outputs[:])
	copy(v[fInput:], prompts[:])
}

func log1p(n int32) float32 { return float32(math.Log1p(float64(n))) }

const (
	treeDepth  = 4
	treeNodes  = 1<<treeDepth - 1
	treeLeaves = 1 << treeDepth
	binsMost   = 64
	noSplit    = 255 // as a node's feature: all go left
)

// tree is complete: node i has children 2i+1 and 2i+2, the leaves follow the
// nodes. A value goes right when its bin is above the node's.
type tree struct {
	feature [treeNodes]uint8
	bin     [treeNodes]uint8
	leaf    [treeLeaves]float32
}

// forest is one boosted model: base plus a leaf of every tree.
type forest struct {
	base  float64
	trees []tree
}

func (f *forest) score(bins *[features]uint8) float64 {
	sum := f.base
	for i := range f.trees {
		t := &f.trees[i]
		at := 0
		for at < treeNodes {
			k := t.feature[at]
			at = 2*at + 1
			if k != noSplit && bins[k] > t.bin[(at-1)/2] {
				at++
			}
		}
		sum += float64(t.leaf[at-treeNodes])
	}
	return sum
}

// model is the pair of forests and the bins they were grown on.
type model struct {
	edges      [features][]float32 // ascending; the bin of x is how many are below it
	classifier forest              // log-odds of ending inside the horizon
	regressor  forest              // steps to the end, of those that do
}

func binOf(edges []float32, x float32) uint8 {
	at, _ := slices.BinarySearch(edges, x)
	return uint8(at)
}

func (m *model) bins(v *vector) (b [features]uint8) {
	for f := range b {
		b[f] = binOf(m.edges[f], v[f])
	}
	return b
}

func (m *model) predict(v *vector, h int) Prediction {
	b := m.bins(v)
	return link(m.classifier.score(&b), m.regressor.score(&b), h)
}

// link turns the scores of the two forests into a prediction.
func link(logOdds, steps float64, h int) Prediction {
	return Prediction{P: 1 / (1 + math.Exp(-logOdds)), Mu: min(max(steps, 1), float64(h))}
}

// treesJSON is how a fit file carries the model and the traffic at its end.
type treesJSON struct {
	Features   []string    `json:"features"`
	Edges      [][]float32 `json:"edges"`
	Classifier forestJSON  `json:"classifier"`
	Regressor  forestJSON  `json:"regressor"`
	Outputs    recentJSON  `json:"recent_outputs"`
	Prompts    recentJSON  `json:"recent_prompts"`
}

// forestJSON holds trees one after the other, in base64: 15 features and 15
// bins of a byte a tree; 16 leaves of a little-endian float32.
type forestJSON struct {
	Base   float64 `json:"base"`
	Nodes  []byte  `json:"nodes"`
	Leaves []byte  `json:"leaves"`
}

func (f *forest) export() forestJSON {
	j := forestJSON{Base: f.base}
	for i := range f.trees {
		t := &f.trees[i]
		j.Nodes = append(append(j.Nodes, t.feature[:]...), t.bin[:]...)
		for _, leaf := range t.leaf {
			j.Leaves = binary.LittleEndian.AppendUint32(j.Leaves, math.Float32bits(leaf))
		}
	}
	return j
}

func (j *forestJSON) restore() (forest, error) {
	n := len(j.Nodes) / (2 * treeNodes)
	if len(j.Nodes) != n*2*treeNodes || len(j.Leaves) != n*4*treeLeaves {
		return forest{}, fmt.Errorf("%d bytes of nodes and %d of leaves are not a whole number of trees of %d and %d",
			len(j.Nodes), len(j.Leaves), 2*treeNodes, 4*treeLeaves)
	}
	f := forest{base: j.Base, trees: make([]tree, n)}
	for i := range f.trees {
		t := &f.trees[i]
		at := j.Nodes[i*2*treeNodes:]
		copy(t.feature[:], at)
		copy(t.bin[:], at[treeNodes:])
		for _, k := range t.feature {
			if k >= features && k != noSplit {
				return forest{}, fmt.Errorf("tree %d splits on feature %d of %d", i, k, features)
			}
		}
		for l := range t.leaf {
			t.leaf[l] = math.Float32frombits(binary.LittleEndian.Uint32(j.Leaves[(i*treeLeaves+l)*4:]))
			if x := float64(t.leaf[l]); math.IsNaN(x) || math.IsInf(x, 0) {
				return forest{}, fmt.Errorf("tree %d has a leaf of %v", i, x)
			}
		}
	}
	return f, nil
}

func (m *model) export(outputs, prompts *recent) *treesJSON {
	return &treesJSON{
		Features: featureNames[:], Edges: m.edges[:],
		Classifier: m.classifier.export(), Regressor: m.regressor.export(),
		Outputs: outputs.export(), Prompts: prompts.export(),
	}
}

func (j *treesJSON) restore() (*model, error) {
	if !slices.Equal(j.Features, featureNames[:]) {
		return nil, fmt.Errorf("trees over %v, this evenkeel computes %v: fit again", j.Features, featureNames)
	}
	if len(j.Edges) != features {
		return nil, fmt.Errorf("edges of %d features, want %d", len(j.Edges), features)
	}
	m := &model{}
	for f, edges := range j.Edges {
		if len(edges) >= binsMost || !slices.IsSorted(edges) {
			return nil, fmt.Errorf("%d edges of %s: want at most %d, ascending", len(edges), featureNames[f], binsMost-1)
		}
		m.edges[f] = edges
	}
	if len(j.Outputs.Last) > recentMost || len(j.Prompts.Last) > recentMost {
		return nil, fmt.Errorf("%d recent outputs and %d prompts, want at most %d", len(j.Outputs.Last), len(j.Prompts.Last), recentMost)
	}
	var errC, errR error
	m.classifier, errC = j.Classifier.restore()
	m.regressor, errR = j.Regressor.restore()
	if errC != nil {
		errC = fmt.Errorf("classifier: %w", errC)
	}
	if errR != nil {
		errR = fmt.Errorf("regressor: %w", errR)
	}
	return m, errors.Join(errC, errR)
}
