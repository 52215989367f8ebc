package policy

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/parser"
	"github.com/expr-lang/expr/vm"

	"evenkeel/internal/spelling"
)

// Definition is a policy that a user wrote, with expressions over the names of Indicators.
type Definition struct {
	Filter    string `yaml:"filter" json:"filter,omitempty"`       // whether an engine is eligible; ignored if no engine would be
	Score     string `yaml:"score" json:"score"`                   // expression for a number; the smallest wins, or the largest by Objective
	Objective string `yaml:"objective" json:"objective,omitempty"` // whether the smallest (min, the default) or the largest score wins (max)
	// TieBreak lists the indicators that decide between equal scores. The smaller value comes first,
	// or the larger one if the name has a - before it.
	TieBreak []string `yaml:"tie_break" json:"tie_break,omitempty"`
}

// DefinitionError is one mistake in a Definition, with its place.
type DefinitionError struct {
	Policy, Key  string // the wrong key is for example score or tie_break[1]
	Line, Column int    // in the key's text, from 1; 0: the whole text
	Msg          string
}

func (e *DefinitionError) Error() string {
	return fmt.Sprintf("policy %s: %s: %s", e.Policy, e.Key, e.Where())
}

func (e *DefinitionError) Where() string {
	if e.Line == 0 {
		return e.Msg
	}
	return fmt.Sprintf("%s (%d:%d)", e.Msg, e.Line, e.Column)
}

// Library holds a user's policies, in addition to the built-in ones. A nil Library has only these.
type Library struct {
	ForServing bool // policies that are only meant for simulations are refused

	custom map[string]*user
}

// user is a compiled Definition. Several policies may share it.
type user struct {
	name          string
	filter, score *vm.Program
	sign          float64 // -1 if the largest score wins
	ties          []tieKey
}

// run is the state of one Policy that uses a user's definition.
type run struct {
	*user
	machine vm.VM
	passed  []bool // by candidate of the last choice
	ignored bool   // the filter is ignored, because no candidate passed it
}

// NewLibrary compiles definitions by name. Its error joins a DefinitionError for each mistake.
func NewLibrary(definitions map[string]Definition) (*Library, error) {
	l := &Library{custom: map[string]*user{}}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(definitions)) {
		u, err := compile(name, definitions[name])
		l.custom[name] = u
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return l, nil
}

// Names lists the built-in policies, then the user's.
func (l *Library) Names() []string {
	if l == nil {
		return Names()
	}
	builtin := slices.DeleteFunc(Names(), func(name string) bool {
		_, only := simulationOnly(name)
		return only && l.ForServing
	})
	return append(builtin, slices.Sorted(maps.Keys(l.custom))...)
}

func (l *Library) customNamed(name string) *user {
	if l == nil {
		return nil
	}
	return l.custom[name]
}

func compile(name string, d Definition) (*user, error) {
	u := &user{name: name, sign: 1}
	var errs []error
	bad := func(key, msg string) {
		errs = append(errs, &DefinitionError{Policy: name, Key: key, Msg: msg})
	}
	expression := func(key, text string, result expr.Option) *vm.Program {
		program, err := compileExpression(text, result)
		if err != nil {
			err.Policy, err.Key = name, key
			errs = append(errs, err)
		}
		return program
	}
	writable := name != "" && !strings.ContainsAny(name, ":,= ") // these characters end a name in a spec
	if !writable || slices.Contains(Names(), name) {
		bad("name", fmt.Sprintf("%q is built in or cannot be written in prefill.policy; use another name, of letters, digits and dashes", name))
	}
	if d.Score == "" {
		bad("score", `it has none; write an expression, such as "p_tokens * (bs + 1)"`)
	} else {
		u.score = expression("score", d.Score, expr.AsFloat64())
	}
	if d.Filter != "" {
		u.filter = expression("filter", d.Filter, expr.AsBool())
	}
	switch d.Objective {
	case "", "min":
	case "max":
		u.sign = -1
	default:
		bad("objective", fmt.Sprintf("%q is none; write min or max", d.Objective))
	}
	if d.TieBreak == nil { // an empty list, in contrast, leaves no tie-break but the hash
		u.ties = cacheAwareTies
	}
	for i, text := range d.TieBreak {
		k, err := tieKeyFor(text)
		if err != nil {
			bad(fmt.Sprintf("tie_break[%d]", i), err.Error())
		}
		u.ties = append(u.ties, k)
	}
	return u, errors.Join(errs...)
}

// functions that an expression may call.
var functions = []string{"abs", "ceil", "floor", "max", "min", "round"}

// maxNodes bounds the syntax nodes in an expression, and so the cost of evaluating it.
const maxNodes = 64

// compileExpression demands a value of the type result. The caller adds the policy and the key to
// the error.
func compileExpression(text string, result expr.Option) (*vm.Program, *DefinitionError) {
	errorAt := func(msg string, where file.Location) *DefinitionError {
		e := (&file.Error{Location: where, Message: msg}).Bind(file.NewSource(text))
		return &DefinitionError{Line: e.Line, Column: e.Column + 1, Msg: msg}
	}
	wrap := func(err error) *DefinitionError {
		var syntaxError *file.Error
		if errors.As(err, &syntaxError) {
			return &DefinitionError{Line: syntaxError.Line, Column: syntaxError.Column + 1, Msg: syntaxError.Message}
		}
		return &DefinitionError{Msg: err.Error()}
	}
	tree, err := parser.Parse(text)
	if err != nil {
		return nil, wrap(err)
	}
	var checker nodeChecker
	ast.Walk(&tree.Node, &checker)
	if checker.refused != nil {
		return nil, errorAt(fmt.Sprintf("%s is not for expressions here; they have numbers, the indicators, arithmetic, comparisons, "+
			"?: and %s", checker.what, strings.Join(functions, ", ")), checker.refused.Location())
	}
	options := []expr.Option{expr.Env(&Indicators{}), result, expr.MaxNodes(maxNodes), expr.DisableAllBuiltins()}
	for _, name := range functions {
		options = append(options, expr.EnableBuiltin(name))
	}
	program, err := expr.Compile(text, options...)
	if err != nil {
		return nil, wrap(err)
	}
	return program, nil
}

// nodeChecker finds the first node that is not allowed in an expression: disabling the library's
// builtin functions does not disable loops over ranges.
type nodeChecker struct {
	refused ast.Node
	what    string
}

var operators = []string{
	"+", "-", "*", "/", "%", "**", "^", "<", "<=", ">", ">=", "==", "!=", "&&", "||", "and", "or", "!", "not",
}

func (g *nodeChecker) Visit(node *ast.Node) {
	what := ""
	switch n := (*node).(type) {
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.ConditionalNode:
	case *ast.IdentifierNode: // expr.Compile refuses unknown names
	case *ast.UnaryNode:
		if !slices.Contains(operators, n.Operator) {
			what = n.Operator
		}
	case *ast.BinaryNode:
		if !slices.Contains(operators, n.Operator) {
			what = n.Operator
		}
	case *ast.BuiltinNode:
		if !slices.Contains(functions, n.Name) {
			what = n.Name
		}
	case *ast.CallNode:
		if callee, ok := n.Callee.(*ast.IdentifierNode); !ok || !slices.Contains(functions, callee.Value) {
			what = "this call"
		}
	default:
		what = "this"
	}
	if what != "" && g.refused == nil {
		g.refused, g.what = *node, what
	}
}

// indicators maps each name to the index of its field in Indicators.
var indicators = func() map[string]int {
	byName := map[string]int{}
	t := reflect.TypeFor[Indicators]()
	for i := range t.NumField() {
		byName[t.Field(i).Tag.Get("expr")] = i
	}
	return byName
}()

func tieKeyFor(text string) (tieKey, error) {
	name, descending := strings.CutPrefix(text, "-")
	field, ok := indicators[name]
	if !ok {
		names := slices.Sorted(maps.Keys(indicators))
		return nil, fmt.Errorf("no indicator is named %q%s; there are %s", name, spelling.Hint(name, names), strings.Join(names, ", "))
	}
	sign := 1.0
	if descending {
		sign = -1
	}
	return func(e *Engine) float64 { return sign * e.value(field) }, nil
}

func (i *Indicators) value(field int) float64 { return reflect.ValueOf(i).Elem().Field(field).Float() }

func (u *user) build() *Policy {
	return &Policy{name: u.name, spec: u.name, ties: u.ties, user: &run{user: u}}
}

// applyFilter stores the results of the user's filter for passes. skipped says that no candidate
// passed.
func (p *Policy) applyFilter(candidates []Engine) (skipped bool) {
	if p.user == nil || p.user.filter == nil {
		return false
	}
	r := p.user
	r.passed = r.passed[:0]
	anyPassed := false
	for i := range candidates {
		result, err := r.machine.Run(r.filter, &candidates[i].Indicators)
		passed := err != nil || result == true // a filter that fails must not exclude a candidate
		anyPassed = anyPassed || passed
		r.passed = append(r.passed, passed)
	}
	r.ignored = !anyPassed
	return r.ignored
}

func (p *Policy) passes(i int) bool {
	if p.user == nil || p.user.filter == nil || p.user.ignored {
		return true
	}
	return p.user.passed[i]
}

// evaluate is NaN if the expression fails.
func (r *run) evaluate(i *Indicators) float64 {
	v, err := r.machine.Run(r.score, i)
	if err != nil {
		return math.NaN()
	}
	s, ok := v.(float64) // compile demands a number
	if !ok {
		return math.NaN()
	}
	return r.sign * s
}
