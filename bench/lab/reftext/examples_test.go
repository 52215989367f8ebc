package reftext_test

import (
	"fmt"

	"evenkeel/bench/lab/reftext"
)

// Whoever knows the prompt can check the answer, piece by piece.
func ExampleChecker() {
	prompt := reftext.Of(reftext.MakePrompt(7, 100))
	answer := reftext.Text(prompt.Answer, 3)
	c := reftext.NewChecker(prompt.Answer)
	fmt.Println(c.Feed(answer[:4]), c.Feed(answer[4:]), c.Tokens())
	fmt.Println(c.Feed("something else") != nil)
	// Output:
	// <nil> <nil> 3
	// true
}
