import matrix
import ranks

globals().update(matrix.checks())

if __name__ == "__main__":
    ranks.main(globals())
